"""Counters of a sidecar: they never decrease, and count everything once."""

import time
from collections import Counter

import pytest

from pannier.daemon.status_service import Backlog
from pannier.sidecar.metrics import SaveMetrics
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.chunk_codec import Checksums
from support.processes.stretch import BOUND_S

Values = dict[tuple[str, str], float]


class Scene:
    """Saves of one rank each, and their metrics."""

    def __init__(self) -> None:
        self.saves = SaveRegistry()
        self.metrics = SaveMetrics()
        self.saves.add_listener(self.metrics.on_change)

    def enter(self, number: int, size: int = 100) -> tuple[RankSave, DataFile]:
        save = save_pb2.SaveId(job="llama", incarnation="i", group="g", number=number)
        context = sidecar_pb2.SaveContext(
            save=save, checkpoint_id=f"/c/step-{number}", ranks=[0], world_size=1, host="node-0"
        )
        rank = self.saves.enter(context)
        file = DataFile("f", size, None, label="f")
        rank.files["f"] = file
        return rank, file

    def end(self, rank: RankSave, state: "save_pb2.SaveState") -> None:
        self.saves.apply_status(save_pb2.SaveStatus(save=rank.save.id, state=state))

    def values(self) -> Values:
        families = self.metrics.collect(Backlog(), Counter(llama=1), connected=True)
        return {
            (sample.name, next((v for k, v in sample.labels.items() if k != "training_job"), "")): (
                sample.value
            )
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_upload_that_starts_over_takes_nothing_back(scene: Scene) -> None:
    rank, file = scene.enter(1)
    file.restore(Checksums(100))
    file.upload.advance(60)
    assert scene.values()[("pannier_bytes_total", "uploaded")] == 60
    file.upload.advance(10)
    scene.saves.record_retry(rank, "503")
    values = scene.values()
    assert values[("pannier_bytes_total", "uploaded")] == 60
    assert values[("pannier_upload_retries_total", "")] == 1
    file.upload.complete(100)
    scene.end(rank, save_pb2.SAVE_STATE_COMMITTED)
    values = scene.values()
    assert values[("pannier_bytes_total", "uploaded")] == 100
    assert values[("pannier_bytes_total", "durable")] == 100
    assert values[("pannier_saves_ended_total", "committed")] == 1


def test_what_has_ended_stays_counted_and_what_goes_on_is_added(scene: Scene) -> None:
    for number in range(1, 4):
        rank, file = scene.enter(number)
        file.restore(Checksums(100))
        scene.saves.set_stall(rank, 0.5)
        before = scene.values()[("pannier_bytes_total", "ingested")]
        scene.end(
            rank, save_pb2.SAVE_STATE_ABORTED if number == 2 else save_pb2.SAVE_STATE_COMMITTED
        )
        values = scene.values()
        assert values[("pannier_bytes_total", "ingested")] == before == 100 * number
        assert values[("pannier_stall_seconds_total", "")] == 0.5 * number
    assert values[("pannier_saves_ended_total", "aborted")] == 1
    assert values[("pannier_saves", "staging")] == 0


def test_the_age_of_the_oldest_save_goes_on_after_a_restart(scene: Scene) -> None:
    key = ("pannier_oldest_save_age_seconds", "")
    assert scene.values()[key] == 0
    scene.enter(1)[0].save.created_at = time.time() + 3600  # the clock was set back
    assert scene.values()[key] == 0
    # As recovered from the journal.
    rank, _ = scene.enter(2)
    rank.save.created_at = time.time() - 3600
    assert 3600 <= scene.values()[key] < 3600 + BOUND_S
    scene.end(rank, save_pb2.SAVE_STATE_COMMITTED)
    assert scene.values()[key] == 0


def test_a_failure_is_counted_once_before_and_after_the_outcome(scene: Scene) -> None:
    rank, _ = scene.enter(1)
    scene.saves.fail(rank, save_pb2.FAILURE_KIND_STORAGE, "403")
    assert scene.values()[("pannier_failures_total", "storage")] == 1
    scene.end(rank, save_pb2.SAVE_STATE_ABORTED)
    values = scene.values()
    assert values[("pannier_failures_total", "storage")] == 1
    assert values[("pannier_failures_total", "lost")] == 0


def test_what_an_earlier_process_did_is_not_counted_again(scene: Scene) -> None:
    rank, file = scene.enter(1)
    file.restore(Checksums(70))
    scene.metrics.set_baseline(scene.saves.undecided())
    assert scene.values()[("pannier_bytes_total", "ingested")] == 0
    file.restore(Checksums(100))
    assert scene.values()[("pannier_bytes_total", "ingested")] == 30
    scene.end(rank, save_pb2.SAVE_STATE_COMMITTED)
    assert scene.values()[("pannier_bytes_total", "ingested")] == 30

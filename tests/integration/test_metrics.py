"""What both daemons serve to Prometheus, from real saves."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pannier.v1 import sidecar_pb2
from support.actors.hand import Party
from support.network.status_pages import Scrape, until
from support.processes.daemons import Daemons
from support.processes.ranks import free_port, start_ranks
from support.processes.stretch import BOUND_S

TRAINER = """
import os
import torch
from pannier import client

for step in (7, 8):
    client.save({"weight": torch.arange(100_000.0) + step}, checkpoint_id=f"{os.environ['ROOT']}/step-{step}")
"""


class Scraped:
    """Running daemons, and the metrics that they serve."""

    def __init__(self, directory: Path) -> None:
        self.sidecar_web, self.coordinator_web = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.daemons = Daemons(
            directory,
            sidecar_arguments=["--metrics", self.sidecar_web, "--spool-budget", "64MiB"],
            coordinator_arguments=["--metrics", self.coordinator_web.rpartition(":")[2]],
        )

    @property
    def sidecar(self) -> Scrape:
        return Scrape(self.sidecar_web)

    @property
    def coordinator(self) -> Scrape:
        return Scrape(self.coordinator_web)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    with ExitStack() as stack:
        made = Scraped(tmp_path_factory.mktemp("metrics"))
        stack.enter_context(made.daemons)
        yield made


def test_a_save_of_a_trainer_is_counted_by_both(scraped: Scraped, tmp_path: Path) -> None:
    environment = scraped.daemons.env(ROOT=str(tmp_path), PANNIER_JOB="llama")
    with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
        ranks.wait(BOUND_S).check()
    coordinator = scraped.coordinator
    assert coordinator.value("pannier_saves_ended_total", outcome="committed") == 2
    assert coordinator.value("pannier_last_committed_step", training_job="llama") == 8
    assert 0 <= coordinator.value("pannier_last_commit_age_seconds", training_job="llama") < 60
    assert coordinator.value("pannier_save_phase_seconds_count", phase="committed") == 2
    assert coordinator.value("pannier_sidecars") == 1
    sidecar = until(lambda: scraped.sidecar, lambda s: _committed(s) == 2)
    moved = {
        phase: sidecar.value("pannier_bytes_total", training_job="llama", phase=phase)
        for phase in ("staged", "ingested", "uploaded", "durable")
    }
    assert len(set(moved.values())) == 1, moved
    assert moved["durable"] == coordinator.value(
        "pannier_committed_bytes_total", training_job="llama"
    )
    assert moved["durable"] >= 2 * 400_000
    assert 0 < sidecar.value("pannier_stall_seconds_total", training_job="llama") < 60
    assert sidecar.value("pannier_upload_retries_total", training_job="llama") == 0
    assert sidecar.value("pannier_queue_bytes") == 0
    assert sidecar.value("pannier_spool_capacity_bytes") == 64 << 20
    assert 0 < sidecar.value("pannier_spool_reserved_bytes") <= 64 << 20


def test_what_waits_and_what_fails_is_counted(scraped: Scraped, tmp_path: Path) -> None:
    before = scraped.coordinator.value("pannier_failures_total", cause="client")
    with Party(
        [scraped.daemons.sidecar.address] * 2, incarnation="inc2", words=[1 << 18] * 2
    ) as party:
        agreed = party.agree(f"{tmp_path}/step-9", 1)
        assert scraped.coordinator.value("pannier_saves", state="staging") == 1
        party.ingest(f"{tmp_path}/step-9", 1, {0: agreed[0]})
        sidecar = scraped.sidecar
        assert sidecar.value("pannier_saves", state="staging") == 1
        assert sidecar.value("pannier_trainers", training_job="job") == 2
        assert sidecar.value("pannier_spool_saves_bytes") >= 1 << 20
        assert sidecar.value("pannier_oldest_save_age_seconds") > 0
        free = sidecar.value("pannier_spool_free_bytes")
        assert free <= (64 << 20) - sidecar.value("pannier_spool_saves_bytes")
        party.hands[1].fail(party.hands[1].context(f"{tmp_path}/step-9", 1), "it can't")
        coordinator = until(
            lambda: scraped.coordinator,
            lambda s: s.value("pannier_saves_ended_total", outcome="aborted") == 1,
        )
        assert coordinator.value("pannier_failures_total", cause="client") == before + 1
        assert coordinator.value("pannier_last_commit_age_seconds", training_job="job") > 0
        # Nothing of it was committed.
        assert {"training_job": "job"} not in coordinator.labels("pannier_last_committed_step")


def test_counters_restart_with_a_sidecar_and_count_nothing_twice(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    with scraped.daemons, Party([scraped.daemons.sidecar.address], words=[1 << 19]) as party:
        plan = party.agree(f"{tmp_path}/step-1", 1)[0]
        hand = party.hands[0]
        # Half of it: a whole file might be in storage already.
        file = max(plan.files, key=lambda file: file.size)
        header = sidecar_pb2.FileHeader(
            context=hand.context(f"{tmp_path}/step-1", 1),
            attempt=plan.attempt,
            name=file.name,
            size=file.size,
        )
        with hand.stream(header) as stream:
            assert stream.committed() == 0
            stream.send(bytes(1 << 20), 0)
            until(lambda: scraped.sidecar, lambda s: _ingested(s) == 1 << 20)
        scraped.daemons.sidecar.restart()
        # What the sidecar ingested before its restart isn't counted again.
        after = scraped.sidecar
        assert _ingested(after) == 0
        assert after.value("pannier_spool_saves_bytes") >= 1 << 20


def test_every_family_has_help_and_a_unit_in_its_name(scraped: Scraped) -> None:
    for scrape in (scraped.sidecar, scraped.coordinator):
        own = {name: each for name, each in scrape.families.items() if name.startswith("pannier_")}
        assert own
        for name, family in own.items():
            assert family.documentation.endswith("."), name
            assert family.type in ("counter", "gauge", "histogram"), name
            if "Seconds" in family.documentation.split(" since ")[0].split()[:1]:
                assert "seconds" in name, name
            if "Bytes" in family.documentation.split()[:1]:
                assert name.endswith("bytes"), name


def _ingested(scrape: Scrape) -> float:
    return scrape.value("pannier_bytes_total", training_job="job", phase="ingested")


def _committed(scrape: Scrape) -> float:
    return scrape.value("pannier_saves_ended_total", outcome="committed")

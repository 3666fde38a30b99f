import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pannier.client import latest
from pannier.client.loading import catalog
from pannier.client.loading.filesystem import Stat, StorageDir
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, StorageError
from support.processes.cli import pannier_here as pannier
from support.processes.ranks import run_in_turn
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.gcs_server import GcsServer
from support.storage.s3_server import S3Server


def commit(root: Path, name: str, at: float) -> str:
    """A directory that is a checkpoint since ``at``."""
    write(root / name / ".metadata", b"")
    os.utime(root / name / ".metadata", (at, at))
    return str(root / name)


def names(root: Any) -> list[str]:
    return [Path(found.checkpoint_id).name for found in catalog.list_checkpoints(root)]


def saved(root: Path, name: str, attempt: str, at: float) -> str:
    """A checkpoint of Pannier's whose ``.metadata`` was written at ``at``."""
    write_attempt(root / name, attempt, ranks=1, files=1, size=10)
    os.utime(root / name / ".metadata", (at, at))
    return str(root / name)


def test_the_order_is_that_of_the_saves_and_not_of_their_commits(tmp_path: Path) -> None:
    ids = [
        saved(tmp_path, "step-100", "i1-inc-g0000000a-s9", 300),
        saved(tmp_path, "step-200", "i1-inc-g0000000a-s10", 200),
        # After a restart, by a host whose clock is behind.
        saved(tmp_path, "step-150", "i2-inc-g0000000a-s1", 100),
    ]
    found = catalog.list_checkpoints(tmp_path)
    assert [each.checkpoint_id for each in found] == ids
    assert [each.attempt for each in found] == [
        "i1-inc-g0000000a-s9",
        "i1-inc-g0000000a-s10",
        "i2-inc-g0000000a-s1",
    ]
    assert latest(tmp_path) == ids[-1]


def test_what_pannier_did_not_write_comes_first(tmp_path: Path) -> None:
    foreign = [commit(tmp_path, "plain-2", 900), commit(tmp_path, "plain-1", 1000)]
    assert latest(tmp_path) == foreign[1]
    # Written over ours by a plain writer: whose it is isn't known.
    saved(tmp_path, "over", "i3-inc-g0000000a-s1", 1)
    write(tmp_path / "over" / ".metadata", b"a plain writer's")
    os.utime(tmp_path / "over" / ".metadata", (950, 950))
    own = saved(tmp_path, "step-1", "i1-inc-g0000000a-s1", 10)
    assert names(tmp_path) == ["plain-2", "over", "plain-1", "step-1"]
    assert latest(tmp_path) == own


def test_it_is_the_attempt_that_stands_which_orders(tmp_path: Path) -> None:
    """Newer attempts at the same id: one under way, one aborted, one decided but not installed."""
    saved(tmp_path, "step-1", "i1-inc-g0000000a-s1", 500)
    standing = (tmp_path / "step-1" / ".metadata").read_bytes()
    newest = saved(tmp_path, "step-2", "i1-inc-g0000000a-s2", 400)
    write_attempt(tmp_path / "step-1", "i1-inc-g0000000a-s3", commit=False)
    write_decision(tmp_path / "step-1", "i1-inc-g0000000a-s4", records_pb2.OUTCOME_ABORT)
    write_attempt(tmp_path / "step-1", "i1-inc-g0000000a-s5", ranks=1, files=1, size=10)
    write(tmp_path / "step-1" / ".metadata", standing)
    assert [each.attempt for each in catalog.list_checkpoints(tmp_path)] == [
        "i1-inc-g0000000a-s1",
        "i1-inc-g0000000a-s2",
    ]
    assert latest(tmp_path) == newest


def test_a_damaged_decision_of_the_newest_is_an_error_and_one_of_an_older_is_not(
    tmp_path: Path,
) -> None:
    old = saved(tmp_path, "step-1", "i1-inc-g0000000a-s1", 1)
    new = saved(tmp_path, "step-2", "i1-inc-g0000000a-s2", 2)
    write(Path(old) / object_names.decision("i1-inc-g0000000a-s1"), b"{")
    assert latest(tmp_path) == new
    write(Path(new) / object_names.decision("i1-inc-g0000000a-s2"), b"{")
    with pytest.raises(IntegrityError, match="i1-inc-g0000000a-s2/decision is damaged"):
        latest(tmp_path)


def test_the_newest_of_many_takes_a_listing_each_and_few_requests_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 21):
        saved(tmp_path, f"step-{number}", f"i1-inc-g0000000a-s{number}", 100 - number)
    asked: list[str] = []

    def count(method: str) -> None:
        ask = getattr(StorageDir, method)

        def counting(self: StorageDir, *names: str) -> Any:
            asked.append(self.url)
            return ask(self, *names)

        monkeypatch.setattr(StorageDir, method, counting)

    for method in ("list", "stat", "read"):
        count(method)
    assert latest(tmp_path) == str(tmp_path / "step-20")
    # The numbers of incarnations, the root, each directory; .metadata, decision and removal mark of one.
    assert len(asked) == 1 + 1 + 20 + 3


@pytest.mark.parametrize("look", [latest, lambda root: catalog.list_checkpoints(root)[-1]])
def test_one_that_is_saved_again_while_it_is_looked_at_stays_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], Any]
) -> None:
    """Between the listing of its attempts and the look at its ``.metadata``."""
    saved(tmp_path, "step-1", "i1-inc-g0000000a-s1", 1)
    again = saved(tmp_path, "step-2", "i1-inc-g0000000a-s2", 2)
    original, third = StorageDir.stat, "i1-inc-g0000000a-s3"

    def stat(self: StorageDir, name: str) -> Stat:
        if self.url == again and not (Path(again) / object_names.decision(third)).exists():
            # Of another size than the second one's .metadata.
            write_attempt(Path(again), third, ranks=1, files=2, size=10)
        return original(self, name)

    monkeypatch.setattr(StorageDir, "stat", stat)
    found = look(tmp_path)
    assert getattr(found, "checkpoint_id", found) == again
    assert getattr(found, "attempt", third) == third


def test_oldest_first_whatever_the_names(tmp_path: Path) -> None:
    ids = [
        commit(tmp_path, "step-100", 50.5),
        commit(tmp_path, "final", 10),
        commit(tmp_path, "step-2", 99),
    ]
    assert catalog.list_checkpoints(tmp_path) == [
        catalog.CheckpointInfo(ids[1], 10),
        catalog.CheckpointInfo(ids[0], 50.5, step=100),
        catalog.CheckpointInfo(ids[2], 99, step=2),
    ]
    assert latest(tmp_path) == ids[2]


def test_of_one_time_by_name_and_numbers_count(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "step-100", "step-9b", "a"):
        commit(tmp_path, name, 1000)
    assert names(tmp_path) == ["a", "step-9", "step-9b", "step-10", "step-100"]
    assert latest(tmp_path) == str(tmp_path / "step-100")


def test_what_is_not_committed_is_no_checkpoint(tmp_path: Path) -> None:
    committed = commit(tmp_path, "step-1", 1)
    write_attempt(tmp_path / "step-2", "i1-inc-g0000000a-s2", commit=False)
    write_attempt(tmp_path / "step-3", "i1-inc-g0000000a-s3", commit=False)
    write_decision(tmp_path / "step-3", "i1-inc-g0000000a-s3", records_pb2.OUTCOME_ABORT)
    write(tmp_path / "step-4" / "__0_0.distcp", b"half")
    write(tmp_path / "step-5" / "deeper" / ".metadata", b"")
    write(tmp_path / ".pannier" / "incarnations" / "000000000001", b"{}")
    write(tmp_path / "notes.txt", b"")
    (tmp_path / "empty").mkdir()
    assert names(tmp_path) == ["step-1"]
    assert latest(tmp_path) == committed


NESTED = "checkpoint-*/dcp"


def nested(root: Path, step: int, attempt: str, planned_at: float) -> str:
    """A checkpoint of Pannier's two levels below the root, whose save was planned at ``planned_at``."""
    directory = root / f"checkpoint-{step}" / "dcp"
    write_attempt(directory, attempt, ranks=1, files=1, size=10)
    os.utime(directory / object_names.manifest(attempt), (planned_at, planned_at))
    return str(directory)


def test_one_whose_removal_has_begun_is_no_checkpoint(tmp_path: Path) -> None:
    """``pannier rm`` was killed after its mark: no load takes it any more."""
    older = saved(tmp_path, "step-1", "i1-inc-g0000000a-s1", 1)
    newest = "i1-inc-g0000000a-s2"
    saved(tmp_path, "step-2", newest, 2)
    write(tmp_path / "step-2" / object_names.removal_mark(newest), b"{}")
    assert names(tmp_path) == ["step-1"]
    assert latest(tmp_path) == older


def test_checkpoints_deeper_than_one_level_are_found_by_a_pattern(tmp_path: Path) -> None:
    ids = [
        nested(tmp_path, 5, "i1-one-g0000000a-s1", 100),
        nested(tmp_path, 10, "i1-one-g0000000a-s2", 110),
    ]
    write_attempt(tmp_path / "checkpoint-15" / "dcp", "i1-one-g0000000a-s3", ranks=1, commit=False)
    write(tmp_path / "checkpoint-20" / "trainer_state.json", b"{}")
    nested(tmp_path / "checkpoint-5", 7, "i9-deep-g0000000a-s1", 500)
    saved(tmp_path, "step-99", "i9-other-g0000000a-s9", 500)
    write(tmp_path / "checkpoint-30", b"a file")
    found = catalog.list_checkpoints(tmp_path, pattern=NESTED)
    assert [(each.checkpoint_id, each.step) for each in found] == [(ids[0], 5), (ids[1], 10)]
    assert latest(tmp_path, pattern=NESTED) == ids[1]
    assert latest(tmp_path, pattern="checkpoint-5/dcp") == ids[0]
    assert latest(tmp_path, pattern="*/*") == ids[1]
    assert latest(tmp_path, pattern="checkpoint-*/model") is None
    assert latest(tmp_path / "none", pattern=NESTED) is None
    assert latest(tmp_path) == str(tmp_path / "step-99")


def test_a_later_start_is_newer_though_each_directory_numbers_incarnations_by_itself(
    tmp_path: Path,
) -> None:
    """The second start went on from step 5, so that step 10 is the first one's in part of the tree."""
    first, second = "i1-zzz-g0000000a-s{}", "i{}-aaa-g0000000a-s{}"
    ids = [
        nested(tmp_path, 5, first.format(1), 100),
        nested(tmp_path, 20, first.format(30), 130),
        # Number 2 here, since the first start had saved here, too.
        nested(tmp_path, 10, second.format(2, 1), 200),
        nested(tmp_path, 15, second.format(1, 2), 210),
    ]
    # Commits and removals come in any order; times of .metadata don't count.
    os.utime(Path(ids[1]) / ".metadata", (999, 999))
    listed = catalog.list_checkpoints(tmp_path, pattern=NESTED)
    assert [each.checkpoint_id for each in listed] == ids
    assert latest(tmp_path, pattern=NESTED) == ids[3]


def test_an_aborted_save_of_an_earlier_start_leaves_it_earlier(tmp_path: Path) -> None:
    """It was decided after the later start had begun."""
    nested(tmp_path, 5, "i1-one-g0000000a-s2", 100)
    aborted = tmp_path / "checkpoint-3" / "dcp"
    write_decision(aborted, "i1-one-g0000000a-s1", records_pb2.OUTCOME_ABORT)
    newest = nested(tmp_path, 6, "i1-two-g0000000a-s1", 200)
    assert latest(tmp_path, pattern=NESTED) == newest


def test_what_pannier_did_not_write_is_found_by_a_pattern_too(tmp_path: Path) -> None:
    ids = [commit(tmp_path, f"checkpoint-{step}/dcp", at) for step, at in ((9, 10), (8, 20))]
    listed = catalog.list_checkpoints(tmp_path, pattern=NESTED)
    assert [(each.checkpoint_id, each.step) for each in listed] == [(ids[0], 9), (ids[1], 8)]
    assert latest(tmp_path, pattern=NESTED) == ids[1]


def test_a_pattern_lists_only_what_it_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 11):
        start = "one" if step < 6 else "two"
        nested(tmp_path / "bucket" / "run", step, f"i1-{start}-g0000000a-s{step}", 100.0 + step)
    for other in range(20):
        write(tmp_path / "bucket" / "run" / f"logs-{other}" / "deep" / "a", b"x")
    with GcsServer(tmp_path / "served") as server:
        fs = fsspec.filesystem("gs", endpoint_url=server.url, token="anon")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        for path in sorted((tmp_path / "bucket").rglob("*")):
            if path.is_file():
                fs.pipe_file(str(path.relative_to(tmp_path)), path.read_bytes())
        before = len(server.requests())
        assert latest("gs://bucket/run", pattern=NESTED) == "gs://bucket/run/checkpoint-10/dcp"
        asked = server.requests()[before:]
    assert not [each for each in asked if "logs-" in each[1]]
    # The numbers of incarnations, the root, each checkpoint's records; two manifests; decision, .metadata.
    assert len(asked) <= 2 * (1 + 1 + 10 + 2 + 2), asked


@pytest.mark.parametrize("pattern", ["", "/a/*", "../*", "a/**", None])
def test_a_pattern_that_means_nothing_is_refused(tmp_path: Path, pattern: Any) -> None:
    for call in (catalog.list_checkpoints, latest):
        with pytest.raises(InvalidRequestError, match=r"pattern .* give names of directories"):
            call(tmp_path, pattern=pattern)


def test_a_root_without_checkpoints(tmp_path: Path) -> None:
    assert catalog.list_checkpoints(tmp_path) == []
    assert latest(tmp_path / "not" / "there") is None


def test_the_root_may_be_a_url(tmp_path: Path) -> None:
    commit(tmp_path, "step-1", 1)
    assert latest(f"file://{tmp_path}/") == f"file://{tmp_path}/step-1"
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/checkpoints/run/step-1/.metadata", b"")
    assert latest("memory://checkpoints/run") == "memory://checkpoints/run/step-1"


def test_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GcsServer(tmp_path) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        fs = fsspec.filesystem("gs", endpoint_url=server.url, token="anon")
        assert latest("gs://bucket/run") is None
        for name in ("step-2", "step-1"):
            fs.pipe_file(f"bucket/run/{name}/.metadata", b"x")
            fs.pipe_file(f"bucket/run/{name}/__0_0.distcp", b"x")
        fs.pipe_file("bucket/run/step-3/__0_0.distcp", b"x")
        assert names("gs://bucket/run") == ["step-2", "step-1"]
        # Nothing is remembered of a listing.
        fs.pipe_file("bucket/run/step-3/.metadata", b"x")
        assert latest("gs://bucket/run") == "gs://bucket/run/step-3"
        assert catalog.list_checkpoints("gs://bucket")[-1:] == []


def test_a_bucket_that_does_not_exist_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GcsServer(tmp_path) as gcs, S3Server() as s3:
        for storage, options in (("gs", {"endpoint_url": gcs.url}), ("s3", s3.options)):
            for empty in ("bucket", "bucket/run"):
                assert latest(f"{storage}://{empty}", storage_options=options) is None
            for root in ("no-such-bucket", "no-such-bucket/run/deep"):
                url = f"{storage}://{root}"
                with pytest.raises(StorageError, match=f"{url}: its bucket doesn't exist"):
                    latest(url, storage_options=options)
                with pytest.raises(StorageError, match="its bucket doesn't exist"):
                    catalog.list_checkpoints(url, storage_options=options)
                listed = pannier("ls", url, "--storage-options", json.dumps(options))
                assert listed.code != 0
                assert "bucket does not exist" in listed.err


def test_what_can_not_be_read_is_an_error_and_not_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, "step-1", 1)
    commit(tmp_path, "step-2", 2)
    original = StorageDir.stat

    def failing(self: StorageDir, name: str) -> Stat:
        if self.url.endswith("step-2"):
            raise StorageError("storage is away")
        return original(self, name)

    monkeypatch.setattr(StorageDir, "stat", failing)
    with pytest.raises(StorageError, match="storage is away"):
        latest(tmp_path)


def test_a_bucket_that_denies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GcsServer(tmp_path) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        server.fault(kind="status", method="GET", status=403, times=100)
        with pytest.raises(PannierError, match="gs://bucket/run can't be read"):
            latest("gs://bucket/run")


@pytest.mark.parametrize("root", ["", "nonsense://x"])
def test_refuses_what_is_no_root(root: str) -> None:
    with pytest.raises(InvalidRequestError):
        catalog.list_checkpoints(root)


def ranks_learn_it_from_the_first() -> None:
    import os
    from pathlib import Path

    import pytest
    import torch.distributed as dist

    from pannier.client import latest
    from pannier.wire.errors import InvalidRequestError

    rank, root = dist.get_rank(), Path(os.environ["ROOT"]) / "several"
    pair = dist.new_group([1, 2])
    assert latest(root) is None

    def commit(name: str) -> str:
        (root / name).mkdir(parents=True)
        (root / name / ".metadata").touch()
        return str(root / name)

    # All get what the first rank saw, though there is a newer one when they ask.
    if rank == 0:
        first = commit("step-1")
        assert latest(root) == first
        commit("step-2")
    dist.barrier()
    if rank > 0:
        assert latest(root) == str(root / "step-1")
    assert latest(root, no_dist=True) == str(root / "step-2")
    # A group asks by itself; its first rank is not the world's.
    if rank in (1, 2):
        assert latest(root, process_group=pair) == str(root / "step-2")
    else:
        with pytest.raises(InvalidRequestError, match="rank 0 is not in this process group"):
            latest(root, process_group=pair)


def a_failure_of_the_first_rank_is_raised_on_all() -> None:
    import os

    import pytest
    import torch.distributed as dist

    from pannier.client import latest
    from pannier.client.loading.filesystem import StorageDir
    from pannier.client.resume.latest import find_latest
    from pannier.wire.errors import InvalidRequestError, PannierError, StorageError

    def fail(self: StorageDir) -> None:
        raise StorageError("storage is away")

    rank, root = dist.get_rank(), os.environ["ROOT"] + "/failing"
    original, StorageDir.list = StorageDir.list, fail if rank == 0 else StorageDir.list
    with pytest.raises(StorageError, match="storage is away"):
        latest(root)
    StorageDir.list = original
    # And the calls are still in step.
    assert latest(root) is None

    def unasked() -> None:
        raise PannierError("an earlier save failed")

    # One rank's own failure: the first one's reaches all ranks, another's stays its own.
    for culprit in (0, 1):
        if rank == culprit or culprit == 0:
            with pytest.raises(PannierError, match="an earlier save failed"):
                find_latest(root, before=unasked if rank == culprit else lambda: None)
        else:
            assert latest(root) is None
        assert latest(root) is None
    if rank == 0:
        assert latest(root) is None
    else:
        with pytest.raises(InvalidRequestError, match=f"{root}/other.*{root}"):
            latest(f"{root}/other")
    # A pattern that one rank can't use leaves the calls in step; ranks must agree on it.
    with pytest.raises(InvalidRequestError, match="contains"):
        latest(root, pattern="../*")
    if rank == 0:
        assert latest(root, pattern="checkpoint-*/dcp") is None
    else:
        with pytest.raises(InvalidRequestError, match=r"for .*, but .*/checkpoint-\*/dcp"):
            latest(root)
    assert latest(root, pattern="checkpoint-*/dcp") is None


def no_rank_waits_longer_than_its_time_out() -> None:
    """The first rank not at all: what only it calls can't hang."""

    import os
    import time

    import pytest
    import torch.distributed as dist

    from pannier.client import latest
    from pannier.wire.errors import DeadlineError

    began = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(DeadlineError, match=r"waiting for rank 0 \(host .*\): after"):
            latest(os.environ["ROOT"] + "/waiting", timeout=0.5)
        assert time.monotonic() - began > 0.4
    dist.barrier()
    if dist.get_rank() == 0:
        assert latest(os.environ["ROOT"] + "/waiting") is None
    assert time.monotonic() - began < 60


SCENARIOS = (
    (3, ranks_learn_it_from_the_first),
    (2, a_failure_of_the_first_rank_is_raised_on_all),
    (2, no_rank_waits_longer_than_its_time_out),
)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return run_in_turn(SCENARIOS, {"ROOT": str(tmp_path_factory.mktemp("root"))})


@pytest.mark.parametrize("scenario", [scenario.__name__ for _, scenario in SCENARIOS])
def test_on_several_ranks(passed: set[str], scenario: str) -> None:
    assert scenario in passed, "see the ranks' output where they were started"

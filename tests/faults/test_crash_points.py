"""Each place where a daemon or a command changes what outlives it: it dies there, and all is well."""

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf import json_format

from pannier.common.fault_points import POINTS, VARIABLE
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.actors.crash_walk import Saver
from support.actors.scripted_sidecar import wait_until
from support.chaos.check import leftovers
from support.processes.cli import Result, pannier, pannier_here
from support.processes.daemons import Daemon, Daemons, memory_directory
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import listed


def _points(*begins: str) -> list[str]:
    return sorted(point for point in POINTS if point.startswith(begins))


COORDINATOR = _points("coordinator.", "sweep.mark.")
SIDECAR = _points("sidecar.")
BOTH = _points("sidecar.spool_file.", "sidecar.opened.", "sidecar.held.", "sidecar.ingested.")
"""Those that a rank passes in another way, or with another owner, when it is streamed."""
GC = _points("sweep.deletion.", "sweep.decision.", "sweep.leftover.")
RM = _points("sweep.removal.", "sweep.metadata.")


@pytest.fixture
def root() -> Iterator[Path]:
    directory = memory_directory()
    yield directory / "root"
    shutil.rmtree(directory)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(
        tmp_path, sidecars=2, coordinator_arguments=["--grace-superseded", "0"], start=False
    ) as made:
        yield made


def test_each_place_is_walked() -> None:
    assert sorted(POINTS) == sorted([*COORDINATOR, *SIDECAR, *GC, *RM])


def run(daemon: Daemon, point: str) -> None:
    daemon.environment[VARIABLE] = point
    daemon.start(ready=False)


def await_death(daemon: Daemon, point: str, saver: Saver) -> None:
    deadline = time.monotonic() + BOUND_S
    while daemon.process.returncode is None:
        saver.check()
        assert time.monotonic() < deadline, f"{point} is not passed"
        time.sleep(0.02)
    assert daemon.process.returncode == -signal.SIGKILL, f"{point}:\n{daemon.log()}"


def local_copies(address: str) -> set[str]:
    """Checkpoints that a sidecar has a local copy of."""
    return {copy.checkpoint_id for copy in listed(address).local_copies}


def check_all(root: Path, saver: Saver, daemons: Daemons) -> None:
    """What was handed over is there, nothing else is, and the daemons leave but the last save's copy."""
    last = saver.save()
    while last.failed:
        last = saver.save()
    assert last.outcome == records_pb2.OUTCOME_COMMIT
    # One that claims its plan may have followed.
    committed = [made.id for made in saver.made if made.outcome == records_pb2.OUTCOME_COMMIT]
    for sidecar in daemons.sidecars:
        wait_until(lambda address=sidecar.address: local_copies(address) == {committed[-1]})  # type: ignore[misc]
    files = sum(
        copy.files for sidecar in daemons.sidecars for copy in listed(sidecar.address).local_copies
    )
    for daemon in (daemons.coordinator, *daemons.sidecars):
        assert daemon.stop() == 0
    assert len(list(daemons.spool.rglob("*.data"))) == files
    check_swept(root, {made.id: made.attempt for made in saver.made if made.handed_over})


def check_swept(root: Path, committed: dict[str, str]) -> None:
    """After one more ``pannier gc`` there is what was committed, whole, and nothing else."""
    done = gc(root)
    assert done.code == 0, done
    for id in committed:
        # Extra files, too.
        verified = pannier_here("verify", id)
        assert verified.code == 0, verified
    plain = {
        path
        for path in root.glob("*/**/*")
        if path.is_file() and ".pannier" not in path.parts and path.suffix not in (".distcp", "")
    }
    assert plain == {
        Path(id, each.name) for id, attempt in committed.items() for each in extra(id, attempt)
    }
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    assert leftovers(names, str(root), committed) == []
    visible = {str(path.parent) for path in root.glob("*/.metadata")}
    assert visible == set(committed)


def extra(id: str, attempt: str) -> Sequence[records_pb2.ExtraFile]:
    """The extra files of a committed attempt."""
    decision = Path(id, object_names.decision(attempt)).read_bytes()
    return json_format.Parse(decision, records_pb2.Decision()).extra_files


def gc(root: Path) -> Result:
    return pannier_here("gc", str(root), "--grace", "0", "--abandoned-after", "0")


@pytest.mark.slow
@pytest.mark.timeout(stretched(300))
@pytest.mark.parametrize("who", ["coordinator", "sidecar"])
def test_a_daemon_that_dies_there_loses_nothing_and_leaves_nothing(
    daemons: Daemons, root: Path, who: str
) -> None:
    points, streamed, mortal = {
        "coordinator": (COORDINATOR, [], daemons.coordinator),
        "sidecar": (SIDECAR, BOTH, daemons.sidecar),
    }[who]
    for daemon in {daemons.coordinator, *daemons.sidecars} - {mortal}:
        daemon.start(ready=False)
    saver = Saver([sidecar.address for sidecar in daemons.sidecars], root)
    saver.claims = True
    with saver:
        for mapped, point in [
            *((True, each) for each in points),
            *((False, each) for each in streamed),
        ]:
            # Each life begins with what the death before has left.
            saver.mapped = mapped
            # A new file: none that the life before has left fits.
            saver.large = ".held." in point or point.endswith("spool_file.created")
            run(mortal, point)
            await_death(mortal, point, saver)
        saver.large = False
        run(mortal, "")
    saver.check()
    assert any(made.mapped for made in saver.made)
    check_all(root, saver, daemons)


# Commands.


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A root with all that ``pannier gc`` removes, and what of it was committed, by id."""
    memory = memory_directory()
    root = memory / "root"
    try:
        with Daemons(tmp_path_factory.mktemp("left"), sidecars=2) as daemons:
            saver = Saver([sidecar.address for sidecar in daemons.sidecars], root)
            for _ in range(4):
                saver.save()
            saver.check()
            first, second, failed, last = saver.made
            assert first.id == last.id
            # Its decision comes before.
            installed = Path(last.id, object_names.METADATA)
            wait_until(lambda: last.attempt.encode() in installed.read_bytes())
            # A killed host wrote it late.
            late = object_names.data_file(failed.attempt, 0, 0)
            Path(failed.id, late).write_bytes(b"late")
            Path(last.id, object_names.clock("abc")).write_bytes(b"")
        yield root, {last.id: last.attempt, second.id: second.attempt}
    finally:
        shutil.rmtree(memory)


@pytest.fixture
def copied(left: tuple[Path, dict[str, str]], root: Path) -> tuple[Path, dict[str, str]]:
    original, committed = left
    shutil.copytree(original, root)
    return root, {id.replace(str(original), str(root)): a for id, a in committed.items()}


@pytest.mark.parametrize("point", GC)
def test_gc_that_dies_there_goes_on_when_it_is_run_again(
    copied: tuple[Path, dict[str, str]], point: str
) -> None:
    root, committed = copied
    arguments = ["gc", str(root), "--grace", "0", "--abandoned-after", "0"]
    died = pannier(*arguments, env={VARIABLE: point})
    assert died.code == -signal.SIGKILL, died
    check_swept(root, committed)


@pytest.mark.parametrize("point", RM)
def test_rm_that_dies_there_goes_on_when_it_is_run_again(
    copied: tuple[Path, dict[str, str]], point: str
) -> None:
    root, committed = copied
    id, *others = committed
    died = pannier("rm", id, "--yes", env={VARIABLE: point})
    assert died.code == -signal.SIGKILL, died
    again = pannier_here("rm", id, "--yes")
    assert again.code == 0, again
    check_swept(root, {other: committed[other] for other in others})

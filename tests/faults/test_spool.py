"""A sidecar's spool that is full, removed, read-only, another's, or holds what isn't this job's."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pannier.client import BusyError, Client, SaveAbortedError, SaveSkippedError
from pannier.client.config import load_settings
from pannier.v1 import save_pb2
from support.network.other_user import OTHER_UID, needs_root
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.processes.watching import all_in, await_save
from support.states.dcp_readers import plain_load
from support.storage.gcs_server import GcsServer

MIB = 1 << 20
INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)


def saving(daemons: Daemons, job: str = "test") -> Client:
    return Client(load_settings(sidecar=daemons.sidecar_address, job=job))


def state(mib: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((mib * MIB // 4,), float(value))}


def check(checkpoint_id: str, mib: int, value: float = 1.0) -> None:
    blank = {"w": torch.zeros(mib * MIB // 4)}
    plain_load(blank, checkpoint_id)
    assert torch.equal(blank["w"], state(mib, value)["w"])


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own there."""
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine doesn't let the test mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@needs_root
def test_a_disk_that_others_have_filled(tmp_path: Path) -> None:
    """Space is reserved before a byte comes; ``on_busy`` says what to do without any."""
    with (
        mounted(tmp_path / "small", "size=40m") as small,
        Daemons(tmp_path, spool=small) as daemons,
        saving(daemons) as client,
    ):
        filler = small / "filler"
        filler.write_bytes(bytes(24 * MIB))
        root = f"{tmp_path}/run"
        raising = client.async_save(state(20), checkpoint_id=f"{root}/1", on_busy="raise")
        with pytest.raises((BusyError, SaveAbortedError)) as caught:
            raising.result(BOUND_S)
        said = str(caught.value)
        assert f"the spool {small}/0 is " in said
        assert "bytes needed" in said
        assert "on its file system" in said
        skipping = client.async_save(state(20), checkpoint_id=f"{root}/2", on_busy="skip")
        with pytest.raises((SaveSkippedError, SaveAbortedError), match="bytes needed"):
            skipping.result(BOUND_S)
        # What fits isn't kept out, and goes on being whole.
        client.save(state(4), checkpoint_id=f"{root}/3")
        filler.unlink()
        client.save(state(20, 2), checkpoint_id=f"{root}/4", on_busy="wait")
        check(f"{root}/3", 4)
        check(f"{root}/4", 20, 2)
        assert not list(Path(root).glob("[12]/.metadata"))


def test_a_spool_that_is_removed_under_a_running_sidecar(tmp_path: Path) -> None:
    """What was handed over is carried on; the sidecar leaves, and the next one makes a new spool."""
    with (
        GcsServer(tmp_path / "gcs") as server,
        Daemons(tmp_path, environment=server.env) as daemons,
        saving(daemons) as client,
    ):
        client.save(state(1), checkpoint_id="gs://bucket/run/0")
        server.fault(kind="delay", path="upload", seconds=2, times=2)
        handle = client.async_save(state(4, 2), checkpoint_id="gs://bucket/run/1")
        await_save(daemons.coordinator_address, "gs://bucket/run/1", INGESTED)
        shutil.rmtree(daemons.spool / "0")
        assert daemons.sidecar.process.wait(BOUND_S) == 1
        assert "was removed" in daemons.sidecar.log()
        daemons.sidecar.start()
        # The client learns it from the next one.
        assert handle.result(BOUND_S).checkpoint_id == "gs://bucket/run/1"
        client.save(state(1, 3), checkpoint_id="gs://bucket/run/2")
        assert (daemons.spool / "0").stat().st_mode & 0o777 == 0o700


@needs_root
def test_a_read_only_spool_is_refused_at_start(tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "size=16m,ro") as place:
        result = sidecar(tmp_path, place)
    assert result.code == 2, result
    assert str(place) in result.err
    assert "Read-only file system" in result.err


def sidecar(directory: Path, spool: Path):  # type: ignore[no-untyped-def]
    """A sidecar that is expected not to start."""
    return pannier(
        *("sidecar", "--address", f"unix://{directory}/x.sock", "--spool", str(spool)),
        *("--coordinator", "127.0.0.1:7"),
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("running")) as daemons:
        yield daemons


def test_a_second_sidecar_on_the_spool_is_refused_and_the_first_goes_on(
    running: Daemons, tmp_path: Path
) -> None:
    daemons = running
    with saving(daemons) as client:
        client.save(state(1), checkpoint_id=tmp_path / "1")
        before = sorted(os.listdir(daemons.spool / "0"))
        result = sidecar(daemons.directory, daemons.spool / "0")
        assert result.code == 2, result
        assert f"another sidecar works on the spool {daemons.spool}/0" in result.err
        assert "give each its own --spool" in result.err
        assert sorted(os.listdir(daemons.spool / "0")) == before
        client.save(state(1, 2), checkpoint_id=tmp_path / "2")
    check(str(tmp_path / "2"), 1, 2)


@needs_root
def test_what_lies_in_the_spool_and_isnt_ours_is_never_used(tmp_path: Path) -> None:
    """A spool file is another user's, or leads elsewhere: nothing of it is read or written."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    with Daemons(tmp_path, start=False) as daemons:
        spool = daemons.spool / "0"
        spool.mkdir(mode=0o700)
        (spool / "00000001.data").write_bytes(b"theirs" * MIB)
        os.chown(spool / "00000001.data", OTHER_UID, OTHER_UID)
        (spool / "00000002.data").symlink_to(precious)
        linked = daemons.spool / "linked"
        linked.write_bytes(b"linked")
        os.link(linked, spool / "00000003.data")
        (spool / "notes.txt").write_text("not a spool file")
        daemons.coordinator.start()
        daemons.sidecar.start()
        assert precious.read_bytes() == b"precious"
        with saving(daemons) as client:
            client.save(state(2), checkpoint_id=tmp_path / "1")
        for path in spool.glob("*.data"):
            found = path.lstat()
            assert (found.st_uid, found.st_nlink, path.is_symlink()) == (os.geteuid(), 1, False)
        assert (spool / "notes.txt").read_text() == "not a spool file"
        assert linked.read_bytes() == b"linked"
    assert precious.read_bytes() == b"precious"
    check(str(tmp_path / "1"), 2)


def test_no_spool_file_passes_from_one_job_to_another(running: Daemons, tmp_path: Path) -> None:
    spool = running.spool / "0"

    def spool_files() -> set[int]:
        return {path.stat().st_ino for path in spool.glob("*.data")}

    with saving(running, "one") as one, saving(running, "two") as two:
        # One set of files for the newest save, one for the next.
        one.save(state(2), checkpoint_id=tmp_path / "1")
        one.save(state(2, 2), checkpoint_id=tmp_path / "2")
        ours = spool_files()
        assert ours
        two.save(state(2, 3), checkpoint_id=tmp_path / "3")
        two.save(state(2, 4), checkpoint_id=tmp_path / "4")
        # The first job's are as they were, although they would have fitted.
        both = spool_files()
        assert ours < both
        one.save(state(2, 5), checkpoint_id=tmp_path / "5")
        two.save(state(2, 6), checkpoint_id=tmp_path / "6")
        assert spool_files() == both
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 6.0)):
        check(str(tmp_path / str(step)), 2, value)

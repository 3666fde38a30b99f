"""What is staged lies in the sidecar's spool already: mapped files, leased once and used again."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client import Client, StorageWriter, UnavailableError
from pannier.client.config import Settings, load_settings
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S
from support.processes.watching import listed
from support.storage.gcs_server import GcsServer

MIB = 1 << 20


@pytest.fixture(scope="module")
def tcp() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemons(tcp: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    directory = tmp_path_factory.mktemp("mapped")
    with Daemons(directory, sidecar_arguments=["--listen", tcp]) as running:
        yield running


@pytest.fixture
def settings(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in daemons.env().items():
        monkeypatch.setenv(name, value)
    return load_settings()


def mapped_files() -> dict[str, str]:
    """Rights of the spool files that this process has mapped, by inode."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and re.search(r"/\d{8,}\.data", parts[5]):
            found[parts[4]] = parts[1]
    return found


def state(value: float) -> dict[str, object]:
    return {
        "w": torch.full((MIB,), value),
        "small": [torch.full((3,), value) for _ in range(5)],
        "object": {"value": value},
    }


def check(target: str, value: float) -> None:
    into = state(0.0)
    dcp.load(into, checkpoint_id=target, no_dist=True)
    assert bool((into["w"] == value).all())  # type: ignore[attr-defined]
    assert all(bool((small == value).all()) for small in into["small"])  # type: ignore[attr-defined]
    assert into["object"] == {"value": value}


def test_the_same_files_are_mapped_save_after_save(settings: Settings, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Client(settings) as client:
        seen: set[str] = set()
        for number in range(1, 9):
            handles = [
                client.async_save(state(number + part / 2), checkpoint_id=root / f"{number}-{part}")
                for part in (0, 1)
            ]
            for handle in handles:
                handle.result(BOUND_S)
                assert handle.status().transport == "mapped"
                assert handle.status().bytes_ingested == handle.status().bytes
            seen |= mapped_files().keys()
        assert len(seen) == 2
        for number in range(1, 9):
            for part in (0, 1):
                check(str(root / f"{number}-{part}"), number + part / 2)
    del handles, handle
    assert mapped_files() == {}


@contextmanager
def slow_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """Takes no data file until it is cleared; its daemons are those of new clients."""
    with (
        GcsServer(tmp_path / "gcs") as server,
        Daemons(tmp_path, environment=server.env) as daemons,
    ):
        for name, value in daemons.env().items():
            monkeypatch.setenv(name, value)
        server.fault(
            kind="status", method="POST", path="uploadType=resumable", status=503, times=-1
        )
        yield server


def test_what_is_handed_over_is_read_only_until_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_bucket(tmp_path, monkeypatch) as server, Client(load_settings()) as client:
        handle = client.async_save(state(1.0), checkpoint_id="gs://bucket/run/1")
        wait_until(lambda: handle.status().bytes_ingested == handle.status().bytes)
        assert set(mapped_files().values()) == {"r--s"}
        server.clear()
        handle.result(BOUND_S)
        assert set(mapped_files().values()) == {"rw-s"}


def test_closing_waits_for_the_sidecar_and_not_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_bucket(tmp_path, monkeypatch) as server:
        client = Client(load_settings())
        handle = client.async_save(state(1.0), checkpoint_id="gs://bucket/run/1")
        client.close(timeout=BOUND_S)
        assert handle.status().transport == "mapped"
        assert not handle.done()
        server.clear()
        handle.result(BOUND_S)
        wait_until(lambda: mapped_files() == {})


def test_the_status_shows_what_the_spool_takes(
    settings: Settings, daemons: Daemons, tmp_path: Path
) -> None:
    with Client(settings) as client:
        client.save({"w": torch.ones(MIB)}, checkpoint_id=tmp_path / "root" / "1")
        usage = listed(daemons.sidecar_address)
        assert 4 * MIB < usage.spool_leased_bytes <= usage.spool_bytes
    wait_until(lambda: listed(daemons.sidecar_address).spool_leased_bytes == 0)
    assert listed(daemons.sidecar_address).spool_held_bytes == 0


def test_the_socket_beside_the_sidecars_is_as_private(daemons: Daemons) -> None:
    own = Path(daemons.sidecar_address.removeprefix("unix://"))
    beside = own.with_name(own.name + ".fd")
    for each in (own, beside):
        assert stat.S_IMODE(os.stat(each).st_mode) == 0o600


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PANNIER_TRANSPORT": "streamed"}, "PANNIER_TRANSPORT=streamed"),
        ({"PANNIER_SIDECAR": "tcp"}, "over TCP"),
    ],
)
def test_what_cant_be_mapped_is_streamed_and_says_why(
    variables: dict[str, str],
    reason: str,
    tcp: str,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, tcp if value == "tcp" else value)
    with Client(load_settings()) as client:
        handle = client.async_save(state(3.0), checkpoint_id=tmp_path / "root" / "1")
        handle.result(BOUND_S)
        assert handle.status().transport.startswith("streamed: ")
        assert reason in handle.status().transport
    check(str(tmp_path / "root" / "1"), 3.0)


def test_what_must_be_mapped_and_cant_be_is_refused(
    tcp: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PANNIER_TRANSPORT", "mapped")
    monkeypatch.setenv("PANNIER_SIDECAR", tcp)
    refused = pytest.raises(UnavailableError, match=r"PANNIER_TRANSPORT=mapped.*TCP.*auto")
    with Client(load_settings()) as client, refused:
        client.async_save(state(3.0), checkpoint_id=tmp_path / "root" / "1")


def test_a_storage_writer_stages_into_the_spool_too(settings: Settings, tmp_path: Path) -> None:
    target = tmp_path / "root" / "1"
    with Client(settings) as client:
        dcp.save(state(5.0), storage_writer=StorageWriter(target, client=client), no_dist=True)
        # The word of the commit comes in a thread.
        wait_until(lambda: set(mapped_files().values()) == {"rw-s"})
    check(str(target), 5.0)


def test_files_and_descriptors_do_not_pile_up(settings: Settings, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Client(settings) as client:
        client.save(state(1.0), checkpoint_id=tmp_path / "root" / "first")
        client.save(state(1.0), checkpoint_id=tmp_path / "root" / "second")
        before = descriptors()
        for number in range(20):
            sized = {"w": torch.ones(MIB + 4096 * number)}
            client.save(sized, checkpoint_id=tmp_path / "root" / f"{number}")
        assert descriptors() <= before
        assert len(mapped_files()) <= 2


def test_the_sidecar_lets_the_trainers_go_first(daemons: Daemons) -> None:
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    found = set()
    for task in Path(f"/proc/{daemons.sidecar.pid}/task").iterdir():
        with suppress(ProcessLookupError):  # idle threads end
            found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    assert found == {min(19, own + 10)}

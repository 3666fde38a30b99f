"""``pannier doctor`` with real daemons, each broken in one way."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pannier.wire import addresses
from support.actors.hand import Party
from support.network.status_pages import until
from support.processes.cli import Result, pannier
from support.processes.daemons import Daemons, short_directory
from support.processes.ranks import free_port
from support.processes.watching import COMMITTED, await_save
from support.storage.bucket import listed
from support.storage.gcs_server import GcsServer


def doctor(*arguments: str, **environment: str) -> Result:
    return pannier("doctor", "--json", "--timeout", "20", *arguments, env=environment)


def failed(result: Result) -> dict[tuple[str, str], Any]:
    """What is out of order, by whose it is and its name."""
    return {
        (check["of"], check["name"]): check
        for check in result.json()["checks"]
        if check["result"] == "failed"
    }


def found(result: Result, of: str, name: str) -> Any:
    (check,) = [c for c in result.json()["checks"] if (c["of"], c["name"]) == (of, name)]
    return check


@contextmanager
def in_bucket(tmp_path: Path, *allow: str) -> Iterator[tuple[GcsServer, Daemons]]:
    with (
        GcsServer(tmp_path / "gcs", ["bucket"]) as server,
        Daemons(tmp_path, environment=server.env, allow=allow) as daemons,
    ):
        yield server, daemons


def test_nothing_stands_in_the_way(tmp_path: Path) -> None:
    with in_bucket(tmp_path, "gs://bucket/run") as (server, daemons):
        result = doctor("gs://bucket/run", "--address", daemons.sidecar_address)
        assert result.code == 0, result
        assert not failed(result)
        for of in ("sidecar", "coordinator"):
            assert (
                "written, replaced, read, listed and removed"
                in found(result, of, "target")["found"]
            )
        assert found(result, "here", "transport")["found"].startswith("mapped")
        assert "memory (tmpfs), mode 0700" in found(result, "sidecar", "spool")["found"]
        assert not listed(server, "run")
        # Of the coordinator alone; as text.
        said = pannier("doctor", "gs://bucket/run", "--address", daemons.coordinator_address)
        assert said.code == 0
        assert "✓  coordinator  target " in said.out


def test_what_the_daemons_may_not_do(tmp_path: Path) -> None:
    with in_bucket(tmp_path, "gs://bucket/run", "gs://elsewhere") as (server, daemons):
        address = ("--address", daemons.sidecar_address)
        outside = doctor("gs://bucket/other", *address)
        assert outside.code == 1
        assert set(failed(outside)) == {("sidecar", "target"), ("coordinator", "target")}
        assert "--allow" in found(outside, "sidecar", "target")["hint"]

        missing = failed(doctor("gs://elsewhere/run", *address))
        assert "bucket" in missing["coordinator", "target"]["hint"]

        server.fault(kind="status", method="POST", status=403, times=100)
        denied = failed(doctor("gs://bucket/run", *address))
        assert f"user {os.geteuid()}" in denied["sidecar", "target"]["hint"]
        server.clear()

        server.fault(kind="delay", method="POST", seconds=60, times=100)
        unresponsive = failed(doctor("gs://bucket/run", *address))
        assert unresponsive["coordinator", "target"]["found"]
        server.clear()
        assert doctor("gs://bucket/run", *address).code == 0


def test_a_sidecar_without_its_coordinator(daemons: Daemons, tmp_path: Path) -> None:
    daemons.coordinator.kill()
    result = doctor(str(tmp_path), "--address", daemons.sidecar_address)
    assert result.code == 1
    (check,) = failed(result).values()
    assert (check["of"], check["name"]) == ("sidecar", "coordinator")
    assert daemons.coordinator_address in check["found"]


@pytest.mark.parametrize(
    ("wanted", "result", "says"),
    [
        ("streamed", "ok", "PANNIER_TRANSPORT=streamed"),
        ("auto", "warning", "can't connect to"),
        ("mapped", "failed", "can't connect to"),
    ],
)
def test_which_way_the_bytes_would_take(
    daemons: Daemons, wanted: str, result: str, says: str
) -> None:
    Path(daemons.sidecar_address.removeprefix("unix://") + ".fd").unlink()
    answer = doctor("--address", daemons.sidecar_address, PANNIER_TRANSPORT=wanted)
    check = found(answer, "here", "transport")
    assert check["result"] == result
    assert says in check["found"]
    assert answer.code == (result == "failed")


def test_over_tcp_bytes_are_streamed(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemons(tmp_path, sidecar_arguments=["--listen", address]):
        check = found(doctor("--address", address), "here", "transport")
        assert check["result"] == "warning"
        assert "TCP" in check["found"]


def test_no_daemon_is_there(tmp_path: Path) -> None:
    directory = short_directory()
    try:
        missing = doctor("--address", f"unix://{directory}/none.sock")
        assert missing.code == 3
        assert "no such socket" in failed(missing)["here", "address"]["found"]
        refused = doctor("--address", f"127.0.0.1:{free_port()}")
        assert refused.code == 3
        assert ("here", "daemon") in failed(refused)

        # Nothing is configured, and nothing runs yet: this process tries the place itself.
        embedded = {"PANNIER_RUNTIME_DIR": str(directory / "run")}
        well = doctor(str(tmp_path / "new"), **embedded)
        assert well.code == 0
        assert "first trainer starts" in found(well, "here", "address")["found"]
        (tmp_path / "file").touch()
        assert doctor(str(tmp_path / "file"), **embedded).code == 1

        # A daemon that was killed leaves its socket.
        left = Path(addresses.embedded_sidecar(directory / "run").removeprefix("unix://"))
        left.parent.mkdir(parents=True, mode=0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(left))
        again = doctor(str(tmp_path / "new"), **embedded)
        assert again.code == 0
        assert "first trainer starts" in found(again, "here", "address")["found"]
    finally:
        shutil.rmtree(directory)


def test_what_a_restore_of_the_newest_checkpoint_would_use(tmp_path: Path) -> None:
    root = f"{tmp_path}/run"
    with Daemons(tmp_path, sidecars=3) as daemons:
        address = ("--address", daemons.sidecar_address)
        before = found(doctor(root, *address), "sidecar", "restore")
        assert (before["result"], before["found"]) == (
            "ok",
            f"there is no checkpoint below {root} yet",
        )
        with Party([each.address for each in daemons.sidecars[:2]]) as party:
            for step in (1, 2):
                party.save(f"{root}/step-{step}", step)
                await_save(
                    daemons.sidecar.address,
                    f"{root}/step-{step}",
                    lambda each: each.state == COMMITTED,
                )

        def checks() -> tuple[str, str] | None:
            answer = doctor(root, *address)
            own, all_hosts = (
                found(answer, of, "restore")["found"] for of in ("sidecar", "coordinator")
            )
            # A sidecar reports what it has once a second.
            return (own, all_hosts) if "node-0" in all_hosts and "node-1" in all_hosts else None

        own, all_hosts = until(checks, bool)
        assert re.fullmatch(
            r"step-2, the newest checkpoint, (\d+) files, .*: \d+ \(.*\) in the spool of this host; "
            r"\d+ in storage alone",
            own,
        )
        assert re.search(
            r": \d+ \(.*\) in the spool of node-0, which has no --peers: for its ranks alone; "
            r"\d+ \(.*\) in the spool of node-1, .*; 0 in storage alone$",
            all_hosts,
        )
        elsewhere = ("--address", daemons.sidecars[2].address)
        assert found(doctor(root, *elsewhere), "sidecar", "restore")["found"].endswith(
            "all in storage alone"
        )

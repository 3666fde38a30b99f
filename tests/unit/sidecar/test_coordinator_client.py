"""When the sidecar connects to its coordinator again, and for how long it has had none."""

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.sidecar import coordinator_client
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.sidecar.coordinator_stream import CoordinatorStream
from pannier.wire.errors import UnavailableError
from pannier.wire.tls import Tls
from support.network.certificates import Authority
from support.processes.stretch import BOUND_S

ADDRESS = "10.0.0.1:7070"


def test_replaced_certificates_take_a_new_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    original = coordinator_client.open_aio_channel

    def open_aio_channel(address: str, *details: Any) -> Any:
        opened.append(address)
        return original(address, *details)

    monkeypatch.setattr(coordinator_client, "open_aio_channel", open_aio_channel)
    authority = Authority(tmp_path / "ca")
    files = authority.issue("one")

    async def main() -> None:
        client = CoordinatorClient(ADDRESS, Tls(files.cert, files.key, files.ca))
        async with client.running():
            client.refresh_channel()
            assert opened == [ADDRESS]
            await asyncio.sleep(0.01)
            authority.issue("one")
            client.refresh_channel()
            assert opened == [ADDRESS, ADDRESS]

    asyncio.run(main())


def test_it_knows_for_how_long_it_has_had_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(coordinator_client, "time", clock)
    client = CoordinatorClient(ADDRESS, None)
    clock.now += 5
    assert client.detached_s == 5
    assert not client.mark_detached()
    client.mark_attached()
    clock.now += 5
    assert client.detached_s == 0
    assert client.mark_detached()
    clock.now += 7
    # A try to attach that fails doesn't begin the time again.
    assert not client.mark_detached()
    assert client.detached_s == 7


def test_a_refusal_is_what_saves_are_said_to_wait_for() -> None:
    """A coordinator of another version answers each ping, and takes no report of this sidecar."""
    client = CoordinatorClient(ADDRESS, None)
    client.mark_attached()
    assert client.mark_detached("it speaks 6, I 7")
    assert not client.mark_detached("it speaks 6, I 7")
    assert client.description == f"{client.peer} (it refuses this sidecar: it speaks 6, I 7)"
    assert client.mark_detached("it speaks 8, I 7")
    assert not client.mark_detached()
    client.mark_attached()
    assert "last seen" in client.description


def test_a_socket_that_this_user_may_not_look_at_ends_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = tmp_path / "run" / "c.sock"
    original = os.stat

    def stat(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if path == socket:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *more, **named)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(timeouts, "DAEMONS_START_S", 0.01)
    asyncio.run(CoordinatorClient(f"unix://{socket}", None).await_socket(math.inf))


def test_certificates_that_can_not_be_read_are_tried_again_with_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attached = asyncio.Event()

    class Client(CoordinatorClient):
        failures = 2

        def refresh_channel(self) -> None:
            if self.failures:
                self.failures -= 1
                raise OSError("Too many open files")

        def attach(self) -> Any:
            attached.set()
            raise UnavailableError("it is not there")

    async def main() -> None:
        parts: Any = None
        stream = CoordinatorStream(
            Client(ADDRESS, None),
            parts,
            trainers=parts,
            watches=parts,
            loads=parts,
            copies=parts,
            replicas=parts,
            host="node-0",
            sidecar_id="id",
        )
        async with stream.running():
            await asyncio.wait_for(attached.wait(), BOUND_S)

    asyncio.run(main())
    assert f"the stream to the coordinator at {ADDRESS} failed" in caplog.text

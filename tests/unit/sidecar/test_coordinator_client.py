"""When the sidecar connects to its coordinator again, and for how long it has had none."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pannier.sidecar import coordinator_client
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.wire.tls import Tls
from support.network.certificates import Authority

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

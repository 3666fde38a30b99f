"""Which coordinator a session's sidecar speaks to, against a scripted sidecar."""

from typing import Any

import pytest

from pannier.client.config import Settings
from pannier.client.identity import World
from pannier.client.transport.membership import Membership
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.wire.errors import ConfigurationError
from support.actors.scripted_sidecar import ScriptedSidecar


@pytest.mark.parametrize("coordinator", [None, "unix:///nowhere"])
def test_a_sidecar_of_the_named_coordinator_is_taken(
    sidecar: ScriptedSidecar, coordinator: str | None
) -> None:
    settings = Settings(sidecar=sidecar.address, coordinator=coordinator)
    session = Membership(World(alone=True), settings).sidecar()
    assert session.welcome.coordinator == "unix:///nowhere"
    session.close()


def test_a_sidecar_of_another_coordinator_is_refused_with_both_addresses(
    sidecar: ScriptedSidecar,
) -> None:
    settings = Settings(sidecar=sidecar.address, coordinator="10.0.0.2:7070")
    with pytest.raises(
        ConfigurationError, match=r"PANNIER_COORDINATOR=10\.0\.0\.2:7070.*unix:///nowhere"
    ):
        Membership(World(alone=True), settings).sidecar()


def test_a_sidecar_is_opened_ahead_once(
    sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    connect = SidecarClient.connect

    def counted(*arguments: Any, **named: Any) -> SidecarClient:
        opened.append(arguments)
        return connect(*arguments, **named)

    monkeypatch.setattr(SidecarClient, "connect", counted)
    member = Membership(World(alone=True), Settings(sidecar=sidecar.address))
    assert member.open_ahead()
    assert member.open_ahead(), "whether the first one succeeds isn't known yet"
    session = member.sidecar()
    assert member.sidecar() is session
    assert not member.open_ahead()
    assert len(opened) == 1
    session.close()


def test_what_kept_a_sidecar_from_being_opened_ahead_is_raised_where_it_is_needed(
    sidecar: ScriptedSidecar,
) -> None:
    settings = Settings(sidecar=sidecar.address, coordinator="10.0.0.2:7070")
    member = Membership(World(alone=True), settings)
    assert member.open_ahead()
    with pytest.raises(ConfigurationError, match="PANNIER_COORDINATOR"):
        member.sidecar()
    # And again: nothing is kept of it.
    assert member.open_ahead()
    with pytest.raises(ConfigurationError, match="PANNIER_COORDINATOR"):
        member.sidecar()

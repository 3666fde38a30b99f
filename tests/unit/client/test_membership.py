"""Which coordinator a session's sidecar speaks to, against a scripted sidecar."""

import pytest

from pannier.client.config import Settings
from pannier.client.identity import World
from pannier.client.transport.membership import Membership
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

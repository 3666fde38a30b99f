"""Daemons of two wire versions beside each other, as an upgrade in parts leaves them."""

from pathlib import Path

import pytest

from pannier.wire.version import WIRE_VERSION
from support.network.status_pages import until
from support.processes.cli import pannier
from support.processes.daemons import Daemons

OTHER = WIRE_VERSION + 1


@pytest.mark.parametrize("which", ["coordinator", "sidecar"])
def test_a_sidecar_and_a_coordinator_of_two_wire_versions_say_so(
    which: str, tmp_path: Path
) -> None:
    """Both serve, and no save can end: status, doctor, the log and the trainer name versions and remedy."""
    with Daemons(tmp_path, start=False) as daemons:
        other = daemons.coordinator if which == "coordinator" else daemons.sidecar
        other.constants = {"pannier.wire.version.WIRE_VERSION": OTHER}
        other.forked = False
        daemons.coordinator.start()
        daemons.sidecar.start()
        theirs, ours = (WIRE_VERSION, OTHER) if which == "coordinator" else (OTHER, WIRE_VERSION)
        refused = f"the sidecar on node-0 speaks wire version {theirs}, this coordinator"
        log = until(daemons.sidecar.log, lambda text: refused in text)
        assert "attached to the coordinator" not in log.replace("not attached", "")
        assert "run the same version of Pannier in the trainers, the sidecars" in log
        said = pannier("doctor", "--json", "--address", daemons.sidecar_address)
        (check,) = (
            c for c in said.json()["checks"] if (c["of"], c["name"]) == ("sidecar", "coordinator")
        )
        assert check["result"] == "failed"
        assert f"protocol {ours}; this sidecar" in check["found"]
        assert "Upgrade and rollback" in check["hint"]
        # Many tries later there is no second line.
        assert daemons.sidecar.log().count(refused) == 1

"""Cuts between hosts, which are network namespaces here: nothing that was handed over is lost.

A cut drops packets: no end sees an error.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier.client import Client, InDoubtError, PannierError
from pannier.client.config import load_settings
from pannier.common import timeouts
from pannier.v1 import save_pb2
from support.actors.scripted_sidecar import wait_until
from support.chaos.links import Links
from support.network.netns import HERE, Network, network_or_skip
from support.processes.daemons import Daemons
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S
from support.processes.watching import all_in, await_save
from support.storage.gcs_server import GcsServer

INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)
STATE = {"w": torch.arange(4.0 * 2**20), "step": 7}
SMALL = {"w": torch.arange(2.0**18)}
LARGE = {"w": torch.arange(16.0 * 2**20)}
"""64 MiB, seconds on a slow link."""
PORT = 7777


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip("node", "coordinator") as made:
        yield made


@pytest.fixture(scope="module")
def server(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs"), host=network.address(HERE)) as running:
        yield running


@pytest.fixture
def daemons(network: Network, server: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    """The coordinator and the sidecar on hosts of their own; trainers beside the sidecar's socket."""
    with Daemons(tmp_path, environment=server.env, start=False) as made:
        for host, daemon in (("coordinator", made.coordinator), ("node", made.sidecar)):
            daemon.prefix = network.prefix(host)
            listen = f"{network.address(host)}:{PORT}"
            daemon.arguments += ["--listen", listen, "--insecure-listen"]
        place = made.sidecar.arguments.index("--coordinator") + 1
        made.sidecar.arguments[place] = f"{network.address('coordinator')}:{PORT}"
        made.coordinator.start()
        made.sidecar.start()
        yield made
    for host in (HERE, "coordinator", "node"):
        network.mend(host)
    server.clear()


def new_client(
    daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Client:
    for name, value in {**daemons.env(), **server.env}.items():
        monkeypatch.setenv(name, value)
    return Client(load_settings(**settings))


def hold_up(server: GcsServer) -> None:
    """Uploads of large files are refused, and tried again, until ``server.clear()``."""
    server.fault(kind="status", method="POST", path="uploadType=resumable", status=503, times=-1)


def check(client: Client, state: dict[str, object], target: str) -> None:
    loaded = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for name, value in state.items()
    }
    client.load(loaded, checkpoint_id=target)
    for name, value in state.items():
        same = loaded[name] == value
        assert same.all() if isinstance(same, torch.Tensor) else same


@pytest.mark.slow
def test_a_cut_from_the_coordinator_ends_only_saves_whose_deadline_passes_meanwhile(
    network: Network, daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DECISION_S", 1.0)
    monkeypatch.setattr(timeouts, "ABORT_S", 1.0)
    with new_client(daemons, server, monkeypatch, max_in_flight=4) as client:
        hold_up(server)
        patient = client.async_save(STATE, checkpoint_id="gs://bucket/cut/step-1", timeout=60)
        # Long enough for the silence to be noticed, too.
        hasty = client.async_save(STATE, checkpoint_id="gs://bucket/cut/step-2", timeout=16)
        for step in (1, 2):
            await_save(daemons.coordinator_address, f"gs://bucket/cut/step-{step}", INGESTED)
        network.cut("coordinator")
        # Training goes on, by the plan of the first save; with another state the call has to ask,
        # and waits no longer than the save may take.
        other = {"other": torch.ones(3)}
        third = client.async_save(STATE, checkpoint_id="gs://bucket/cut/step-3", timeout=12)
        began = time.monotonic()
        with pytest.raises(PannierError, match=r"coordinator at .*:7777"):
            client.async_save(other, checkpoint_id="gs://bucket/cut/step-4", timeout=2)
        assert time.monotonic() - began < BOUND_S
        with pytest.raises(PannierError, match=r"coordinator at .*:7777"):
            third.result(BOUND_S)
        with pytest.raises(InDoubtError, match=r"waiting for the coordinator at .*last seen"):
            hasty.result(BOUND_S)
        assert not patient.done()
        assert "coordinator at" in patient.status().waiting_on
        network.mend("coordinator")
        server.clear()
        patient.result(BOUND_S)
        check(client, STATE, "gs://bucket/cut/step-1")
        client.save(STATE, checkpoint_id="gs://bucket/cut/step-5", timeout=BOUND_S)


@pytest.mark.slow
def test_a_cut_from_storage_for_seconds_holds_an_upload_up(
    network: Network, daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.slow(HERE, "50mbit")
    with new_client(daemons, server, monkeypatch) as client:
        target = "gs://bucket/storage/step-1"
        handle = client.async_save(LARGE, checkpoint_id=target, timeout=60)

        def uploading(status: save_pb2.SaveStatus) -> bool:
            return 0 < sum(rank.bytes_uploaded for rank in status.ranks) < status.bytes_total

        await_save(daemons.sidecar_address, target, uploading)
        network.cut(HERE)
        time.sleep(3)
        assert not handle.done()
        network.slow(HERE, "1gbit")
        network.mend(HERE)
        handle.result(BOUND_S)
        check(client, LARGE, target)


@pytest.mark.slow
def test_a_trainer_cut_from_its_sidecar_goes_on_where_it_was(
    network: Network, daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.slow("node", "50mbit")
    address = f"{network.address('node')}:{PORT}"
    with new_client(daemons, server, monkeypatch, sidecar=address) as client:
        target = "gs://bucket/remote/step-1"
        handle = client.async_save(LARGE, checkpoint_id=target, timeout=60)
        wait_until(lambda: handle.status().bytes_ingested > 0)
        network.cut(HERE)
        held = handle.status().bytes_ingested
        assert held < handle.status().bytes
        wait_until(lambda: address in handle.status().waiting_on)
        assert not handle.done()
        network.slow("node", "1gbit")
        network.mend(HERE)
        handle.result(BOUND_S)
        check(client, LARGE, target)


@pytest.mark.slow
@pytest.mark.extended
def test_a_far_and_lossy_link_slows_saves_down_and_ends_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latency, and packets that come seconds late, between all three."""
    with Links() as links, Daemons(tmp_path, start=False) as daemons:
        addresses = {}
        for daemon in (daemons.coordinator, daemons.sidecar):
            port = free_port()
            daemon.arguments += ["--listen", f"127.0.0.1:{port}"]
            link = links.add(daemon.name, "127.0.0.1", port)
            # Several round trips until it is connected.
            link.slow(0.3)
            addresses[daemon.name] = link
        place = daemons.sidecar.arguments.index("--coordinator") + 1
        daemons.sidecar.arguments[place] = addresses["coordinator"].address
        daemons.coordinator.start()
        daemons.sidecar.start()
        for name, value in daemons.env(PANNIER_SIDECAR=addresses["sidecar 0"].address).items():
            monkeypatch.setenv(name, value)
        with Client(load_settings()) as client:
            first = str(tmp_path / "root" / "step-1")
            client.save(SMALL, checkpoint_id=first, timeout=60)
            second = client.async_save(SMALL, checkpoint_id=f"{tmp_path}/root/step-2", timeout=60)
            for link in addresses.values():
                link.stall()
            time.sleep(3)
            assert not second.done()
            for link in addresses.values():
                link.mend()
                link.slow(0.1)
            second.result(BOUND_S)
            check(client, SMALL, first)

"""Storage that is slower than training, cuts uploads off or refuses them, as a trainer sees it.

By the real client and real daemons; :mod:`test_storage` and :mod:`test_failure_table` play ranks.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier.client import Client, SaveAbortedError
from pannier.client.config import load_settings
from pannier.v1 import save_pb2
from support.processes.daemons import Daemons, await_serving
from support.processes.processes import Process, python
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import ABORTED, all_in, await_save, listed
from support.storage.bucket import check_whole, decisions_alone, generations
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 20 * MIB
"""Of one save; its data file goes up in two pieces, of which the last is small."""
UNIT = 256 << 10
"""The first has a multiple of so many bytes."""
BUDGET = 70 * MIB
"""Of the spool: three saves."""
PIECES = {"method": "PUT", "path": "upload_id"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


@pytest.fixture(scope="module")
def daemons(shared: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(
        tmp_path_factory.mktemp("slow"),
        sidecars=2,
        environment=shared.env,
        sidecar_arguments=["--spool-budget", str(BUDGET)],
        start=False,
    ) as running:
        running.coordinator.start(ready=False)
        running.sidecar.start()
        await_serving(running.coordinator_address, process=running.coordinator.process)
        yield running


@pytest.fixture
def impatient(daemons: Daemons, tmp_path: Path) -> Iterator[str]:
    """Address of a second sidecar, which takes a store for stalled much sooner."""
    sidecar = daemons.sidecars[1]
    main = "from pannier.common import timeouts; "
    main += "timeouts.STORAGE_IDLE_S = timeouts.STORAGE_CONNECT_S = 5.0; "
    main += "from pannier.cli.main import main; main()"
    process = Process(
        "impatient sidecar",
        python("-c", main, *sidecar.arguments),
        environment=sidecar.environment,
        log=tmp_path / "impatient.log",
    )
    try:
        await_serving(sidecar.address, process=process)
        yield sidecar.address
    finally:
        process.close()


@pytest.fixture
def server(shared: GcsServer) -> Iterator[GcsServer]:
    yield shared
    shared.clear()


@pytest.fixture
def client(daemons: Daemons) -> Iterator[Client]:
    with Client(load_settings(sidecar=daemons.sidecar_address, job="test")) as running:
        yield running


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE // 4,), value, dtype=torch.float32)}


def pieces(server: GcsServer, before: int) -> list[str]:
    """Content-Range of what was sent of data files since ``before`` requests."""
    return [sent for method, _, sent in server.requests()[before:] if method == "PUT"]


def peak(pid: int) -> int:
    """Most memory of its own that a process has had at a time, bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_cut_upload_goes_on_at_what_the_store_holds_and_nothing_is_sent_twice(
    server: GcsServer, daemons: Daemons, client: Client
) -> None:
    target = "gs://bucket/cut/step-1"
    server.fault(kind="partial", bytes=11 * MIB, **PIECES, content_range="bytes 0-")
    before = len(server.requests())
    client.save(state(), checkpoint_id=target)
    sent = pieces(server, before)
    size = int(sent[0].rpartition("/")[2])
    last = size // UNIT * UNIT
    # One request more to ask how far it is: no layer below us retries.
    assert sent == [
        f"bytes 0-{last - 1}/{size}",
        f"bytes */{size}",
        f"bytes {11 * MIB}-{last - 1}/{size}",
        f"bytes {last}-{size - 1}/{size}",
    ]
    status = await_save(daemons.sidecar_address, target, lambda save: True)
    assert [rank.retries for rank in status.ranks] == [1]


def test_a_refusal_in_the_middle_reaches_the_handle_with_rank_host_object_and_cause(
    server: GcsServer, daemons: Daemons, client: Client
) -> None:
    target = "gs://bucket/refused/step-1"
    says = "Invalid Credentials: the token has expired"
    server.fault(
        kind="status",
        status=401,
        message=says,
        times=-1,
        **PIECES,
        content_range=f"bytes {SIZE // UNIT * UNIT}-",
    )
    handle = client.async_save(state(), checkpoint_id=target)
    with pytest.raises(SaveAbortedError) as caught:
        handle.result(BOUND_S)
    for word in ("rank 0", "node-0", ".distcp", "401", says, "check which credentials"):
        assert word in str(caught.value), word
    assert caught.value.failures[0].kind == "STORAGE"
    assert server.faults()[0]["hits"] == 1
    deadline = time.monotonic() + BOUND_S
    while server.sessions() or not decisions_alone(server, "refused/step-1"):
        assert time.monotonic() < deadline, (server.sessions(), generations(server, "refused"))
        time.sleep(0.05)


def test_a_stalled_upload_is_cut_off_and_goes_on(
    server: GcsServer, daemons: Daemons, impatient: str
) -> None:
    target = "gs://bucket/stalled/step-1"
    last = f"bytes {SIZE // UNIT * UNIT}-"
    server.fault(kind="delay", seconds=stretched(20), **PIECES, content_range=last)
    before = len(server.requests())
    with Client(load_settings(sidecar=impatient, job="stalled")) as client:
        client.save(state(), checkpoint_id=target)
    sent = pieces(server, before)
    # What had arrived is not sent once more.
    assert sum(piece.startswith("bytes 0-") for piece in sent) == 1, sent
    assert any(piece.startswith("bytes */") for piece in sent), sent
    (rank,) = await_save(impatient, target, lambda save: True).ranks
    assert rank.retries >= 1
    assert "did not answer for" in rank.last_error


def test_a_commit_whose_answer_is_lost_and_can_not_be_read_is_in_doubt_and_then_true(
    server: GcsServer, daemons: Daemons, client: Client
) -> None:
    target = "gs://bucket/doubt/step-1"
    server.fault(kind="delay", seconds=BOUND_S, **PIECES)
    handle = client.async_save(state(7.0), checkpoint_id=target)
    ingested = all_in(save_pb2.RANK_PHASE_INGESTED)
    await_save(daemons.coordinator_address, target, ingested)
    # After the receipt and the metadata that is to be: the decision.
    server.fault(kind="lost", method="POST", path="uploadType=multipart", skip=2)
    server.fault(kind="status", status=403, method="GET", path="decision", times=-1)
    server.release()
    doubt = save_pb2.SAVE_STATE_IN_DOUBT
    await_save(daemons.coordinator_address, target, lambda save: save.state == doubt)
    # It was decided, but no process can read that: nothing is reported, nothing is deleted.
    names = generations(server, "doubt/step-1")
    assert [name for name in names if name.endswith("/decision")]
    assert "doubt/step-1/.metadata" not in names
    assert not handle.done()
    server.clear()
    handle.result(BOUND_S)
    assert generations(server, "doubt/step-1").keys() >= names.keys()
    check_whole(server, target)


def test_saves_that_pile_up_take_no_more_than_the_spool_and_are_seen(
    server: GcsServer, daemons: Daemons, client: Client
) -> None:
    client.save(state(), checkpoint_id="gs://bucket/pile/step-0")
    idle = listed(daemons.sidecar_address)
    assert (idle.bytes_queued, idle.oldest_upload_s) == (0, 0)
    memory = peak(daemons.sidecar.pid)
    server.fault(kind="status", method="POST", path="uploadType=resumable", status=503, times=-1)
    target = "gs://bucket/pile/step-1"
    handles = [client.async_save(state(1), checkpoint_id=target)]
    status = await_save(
        daemons.coordinator_address,
        target,
        lambda save: all_in(save_pb2.RANK_PHASE_INGESTED)(save) and save.ranks[0].retries >= 2,
    )
    # Seen while it goes on, and by whom and why.
    assert "503" in status.ranks[0].last_error
    assert status.state not in (ABORTED, save_pb2.SAVE_STATE_COMMITTED)
    busy = listed(daemons.sidecar_address)
    assert SIZE <= busy.bytes_queued < SIZE + MIB
    assert 0 < busy.oldest_upload_s < listed(daemons.sidecar_address).oldest_upload_s
    server.clear()
    server.fault(kind="delay", seconds=0.25, times=-1, **PIECES)
    queued = []
    for step in range(2, 8):
        handles.append(
            client.async_save(state(step), checkpoint_id=f"gs://bucket/pile/step-{step}")
        )
        queued.append(listed(daemons.sidecar_address).bytes_queued)
    assert max(queued) <= BUDGET
    for handle in handles:
        handle.result(BOUND_S)
    assert peak(daemons.sidecar.pid) - memory < 3 * 3 * 8 * MIB, "buffers of the uploads"
    done = listed(daemons.sidecar_address)
    assert (done.bytes_queued, done.oldest_upload_s) == (0, 0)

"""How long it takes from a kill until work goes on: ``make bench`` runs this and shows the times.

Two deaths, each at real daemons over the GCS server of the tests. A sidecar that dies with a
checkpoint half uploaded: until it takes calls again, until the next piece is in storage, until
the commit. A coordinator that dies while 64 ranks wait for their plans: until all are answered.
Prints one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pannier.v1 import save_pb2
from support.actors.hand import Party
from support.processes.daemons import Daemons
from support.processes.watching import COMMITTED, all_in, await_save
from support.storage.gcs_server import GcsServer

DEADLINE_S = 300.0
BUCKET = "bench"
INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)


def until(ready: Callable[[], bool]) -> None:
    """Returns when it is so. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError("no progress")
        time.sleep(0.005)


def pieces(server: GcsServer) -> int:
    """How many pieces of data files the server was sent."""
    return sum("upload_id" in path for _, path, _ in server.requests())


def kill_sidecar(directory: Path, size: int) -> dict[str, float]:
    """Seconds from the kill of a sidecar that had uploaded half of ``size`` bytes."""
    target = f"gs://{BUCKET}/half/step-1"
    with (
        GcsServer(directory / "gcs", [BUCKET]) as server,
        Daemons(directory, environment=server.env) as daemons,
        Party([daemons.sidecar_address], words=[size // 4]) as party,
    ):
        plans = party.agree(target, 1, save_timeout_s=DEADLINE_S)
        # What comes after that many pieces is put off.
        half = max(1, size // 2 // (16 << 20))
        server.fault(kind="status", method="PUT", path="upload_id", status=503, times=-1, skip=half)
        party.ingest(target, 1, plans)
        await_save(daemons.coordinator_address, target, INGESTED, timeout=DEADLINE_S)
        until(lambda: pieces(server) > half)
        server.clear()
        daemons.sidecar.kill()
        killed, before = time.monotonic(), pieces(server)
        daemons.sidecar.start()
        serving = time.monotonic() - killed
        until(lambda: pieces(server) > before)
        uploading = time.monotonic() - killed
        await_save(
            daemons.coordinator_address,
            target,
            lambda status: status.state == COMMITTED,
            timeout=DEADLINE_S,
        )
        committed = time.monotonic() - killed
    return {"serving_s": serving, "uploading_s": uploading, "committed_s": committed}


def kill_coordinator(directory: Path, ranks: int) -> dict[str, float]:
    """Seconds from the kill of a coordinator at which all ranks but one had asked for their plans."""
    with Daemons(directory, sidecars=8) as daemons:
        target = str(daemons.spool / "root" / "step-1")
        addresses = [daemons.sidecars[rank * 8 // ranks].address for rank in range(ranks)]
        hosts = [f"node-{rank * 8 // ranks}" for rank in range(ranks)]
        party = Party(addresses)
        for hand, host in zip(party.hands, hosts, strict=True):
            hand.host = host
        with party, ThreadPoolExecutor(ranks) as threads:
            limits = {"timeout_s": DEADLINE_S, "save_timeout_s": DEADLINE_S}

            def ask(rank: int) -> Future[Any]:
                hand = party.hands[rank]
                return threads.submit(hand.agree, hand.context(target), **limits)

            calls = [ask(rank) for rank in range(1, ranks)]
            await_save(
                daemons.coordinator_address,
                target,
                lambda status: len(status.waiting_on.ranks) == 1,
                timeout=DEADLINE_S,
            )
            daemons.coordinator.kill()
            killed = time.monotonic()
            calls.append(ask(0))
            daemons.coordinator.start()
            serving = time.monotonic() - killed
            plans = [call.result(DEADLINE_S) for call in calls]
            planned = time.monotonic() - killed
            agreed = dict(zip([*range(1, ranks), 0], plans, strict=True))
            party.ingest(target, 1, agreed)
            await_save(
                daemons.coordinator_address,
                target,
                lambda status: status.state == COMMITTED,
                timeout=DEADLINE_S,
            )
    return {"serving_s": serving, "planned_s": planned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pannier-bench-") as directory:
        result = {
            "bytes": options.bytes,
            "ranks": options.ranks,
            "sidecar": kill_sidecar(Path(directory) / "sidecar", options.bytes),
            "coordinator": kill_coordinator(Path(directory) / "coordinator", options.ranks),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""The end of a host that has the coordinator of others: it waits until their saves are decided.

For where the daemons can't outlive the trainer. In: the host's embedded daemons and a job. Out: once
nothing of the job is under way any more, or the coordinator is gone. Blocking.
"""

import logging
import time
from typing import Final

import grpc

from pannier.client.embedded.daemon_spec import Pair
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses

_log = logging.getLogger(__name__)

_ENDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_EVERY_S: Final = 0.2
_CALL_S: Final = 10.0


def await_others(pair: Pair, job: str, timeout_s: float | None) -> str:
    """Waits; which saves are still under way after ``timeout_s`` seconds, or empty.

    None is no endless wait: each save ends, well or not, soon after its own deadline.
    """
    if not pair.serves_others:
        return ""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    running = [name for name, state in save_pb2.SaveState.items() if state and state not in _ENDED]
    request = status_pb2.ListSavesRequest(job=job, states=running, limit=16)
    address = addresses.embedded_coordinator(pair.directory)
    told = False
    with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        while True:
            try:
                saves = stub.ListSaves(request, timeout=_CALL_S).saves
            except grpc.RpcError as error:
                _log.warning("the coordinator can't be asked what is under way: %s", error)
                return ""
            if not saves:
                return ""
            if not told:
                _log.info("waiting for %d saves of other hosts to be committed", len(saves))
                told = True
            if deadline is not None and time.monotonic() > deadline:
                return "; ".join(each.checkpoint_id for each in saves)
            time.sleep(_EVERY_S)

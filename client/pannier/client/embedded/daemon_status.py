"""What embedded daemons are doing, by their Status service. In: their spec. Out: answers. Blocking."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from pannier.client.embedded.daemon_spec import DaemonSpec
from pannier.common import timeouts
from pannier.common.units import counted
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from pannier.wire.errors import from_rpc_error

_log = logging.getLogger(__name__)

_ENDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_UNDECIDED: Final = [
    name for name, state in save_pb2.SaveState.items() if state and state not in _ENDED
]


def is_idle(spec: DaemonSpec) -> bool:
    """Whether their sidecar has no client and nothing to upload; also False if that isn't known."""
    address = addresses.embedded_sidecar(spec.directory)
    request = status_pb2.ListSavesRequest(states=_UNDECIDED, limit=1)
    with _status_service(address) as stub:
        try:
            found = stub.ListSaves(request, timeout=timeouts.STATUS_CALL_S)
        except grpc.RpcError as error:
            problem = from_rpc_error(error, peer=f"sidecar at {address}")
            _log.warning(
                "can't see whether the daemons are idle: %s; they are not replaced", problem
            )
            return False
    busy = not found.HasField("trainers") or found.trainers or found.saves or found.bytes_queued
    return not busy


def await_others(spec: DaemonSpec, job: str, incarnation: str, timeout_s: float | None) -> str:
    """Waits for the saves of other hosts, where this host has their coordinator.

    For daemons that don't outlive the trainer: the coordinator would end with this host. Saves that earlier
    starts left are waited for only ``timeouts.RESUMED_SAVE_S``: the job's next start can finish them as well.

    Args:
        timeout_s: None: no limit, since each save ends soon after its own deadline.

    Returns the checkpoint ids still under way after ``timeout_s`` seconds, or "".
    """
    if not spec.serves_others:
        return ""
    start = time.monotonic()
    deadline = None if timeout_s is None else start + timeout_s
    request = status_pb2.ListSavesRequest(job=job, states=_UNDECIDED)
    address = addresses.embedded_coordinator(spec.directory)
    logged = False
    with _status_service(address) as stub:
        while True:
            try:
                saves = list(stub.ListSaves(request, timeout=timeouts.STATUS_CALL_S).saves)
            except grpc.RpcError as error:
                problem = from_rpc_error(error, peer=f"coordinator at {address}")
                _log.warning(
                    "can't list the saves of other hosts: %s; this host's coordinator may end before they "
                    "are committed",
                    problem,
                )
                return ""
            late = time.monotonic() - start > timeouts.RESUMED_SAVE_S
            saves = [each for each in saves if each.save.incarnation == incarnation or not late]
            if not saves:
                return ""
            if not logged:
                others = counted(len(saves), "save")
                _log.info("waiting for %s of other hosts to be committed", others)
                logged = True
            if deadline is not None and time.monotonic() > deadline:
                return "; ".join(each.checkpoint_id for each in saves)
            time.sleep(timeouts.DAEMONS_STATUS_POLL_S)


@contextmanager
def _status_service(address: str) -> Iterator[status_pb2_grpc.StatusStub]:
    with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
        yield status_pb2_grpc.StatusStub(channel)

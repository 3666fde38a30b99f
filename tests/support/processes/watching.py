"""Asking a daemon's Status service, as an operator would, until a save is where a test wants it."""

import time
from collections.abc import Callable

import grpc

from pannier.daemon.rank_phase import has_reached
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from support.processes.channels import OWN_CONNECTION
from support.processes.stretch import BOUND_S

COMMITTED = save_pb2.SAVE_STATE_COMMITTED
ABORTED = save_pb2.SAVE_STATE_ABORTED


def await_save(
    address: str,
    save: str,
    condition: Callable[[save_pb2.SaveStatus], bool],
    *,
    timeout: float = BOUND_S,
) -> save_pb2.SaveStatus:
    """The first status of a save that meets a condition.

    Args:
        address: of a coordinator or a sidecar.
        save: its id, or a checkpoint id (its newest save).

    Raises AssertionError with the last status when the save ends, or the deadline passes,
    without it. A daemon that doesn't accept connections yet is waited for.
    """
    deadline = time.monotonic() + timeout
    last, problem = None, ""
    with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        while time.monotonic() < deadline:
            request = status_pb2.WatchSaveRequest(id=save)
            try:
                for answer in stub.WatchSave(request, timeout=deadline - time.monotonic()):
                    last = answer.save
                    if condition(last):
                        return last
                break
            except grpc.RpcError as error:
                not_yet = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
                if last is not None or error.code() not in not_yet:
                    raise AssertionError(f"{save}: {error.details()}; last: {last}") from error
                problem = error.details()
            # It has not begun yet.
            time.sleep(0.02)
    raise AssertionError(f"{save} did not come to that within {timeout} s: {last or problem}")


def all_in(phase: "save_pb2.RankPhase") -> Callable[[save_pb2.SaveStatus], bool]:
    """Whether all ranks have come to a phase."""
    return lambda status: (
        bool(status.ranks) and all(has_reached(r.phase, phase) for r in status.ranks)
    )


def listed(address: str) -> status_pb2.ListSavesResponse:
    """What a daemon says of itself and its saves."""
    with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
        answer: status_pb2.ListSavesResponse = status_pb2_grpc.StatusStub(channel).ListSaves(
            status_pb2.ListSavesRequest(), timeout=BOUND_S
        )
        return answer

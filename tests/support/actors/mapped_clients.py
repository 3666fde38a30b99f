"""Saves over the mapped transport: clients of one job, and the processes that lease their files next."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.v1 import save_pb2
from pannier.wire.errors import BusyError
from support.actors.lease_holder import LeaseHolder
from support.actors.scripted import Trainer
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.watching import all_in, await_save
from support.states.dcp_readers import plain_load

MIB = 1 << 20
DURABLE = all_in(save_pb2.RANK_PHASE_DURABLE)


def state(value: float, mib: int = 8) -> dict[str, Any]:
    return {"w": torch.full((mib * MIB // 4,), float(value)), "step": int(value)}


def check(checkpoint_id: str, value: float, mib: int = 8) -> None:
    blank = {"w": torch.zeros(mib * MIB // 4), "step": -1}
    plain_load(blank, checkpoint_id)
    assert bool((blank["w"] == value).all())
    assert blank["step"] == value


def saving(daemons: Daemons, job: str = "test", **settings: Any) -> Client:
    return Client(load_settings(sidecar=daemons.sidecar_address, job=job, **settings))


def transport(daemons: Daemons, checkpoint_id: str) -> str:
    """As an operator sees it."""
    status = await_save(daemons.sidecar_address, checkpoint_id, DURABLE)
    (rank,) = status.ranks
    return rank.transport


@contextmanager
def another(daemons: Daemons, job: str = "test") -> Iterator[LeaseHolder]:
    """One more process of the job, played, that borrows."""
    with (
        Trainer(daemons.sidecar_address, job=job, incarnation=os.urandom(4).hex()) as trainer,
        LeaseHolder(trainer, daemons.sidecar_address) as holder,
    ):
        yield holder


def await_reuse(daemons: Daemons, inodes: set[int], size: int) -> None:
    """Waits until another process of the job gets a lease of one of these files."""
    # Files that an earlier request left are taken first: each takes one more than they are.
    requests = count(4)

    def leased() -> bool:
        with another(daemons) as holder, suppress(BusyError):
            return any(each.inode in inodes for each in holder.lease(*[size] * next(requests)))
        return False

    wait_until(leased)

"""A trainer that starts DataLoader workers, and forks, while its session streams a file.

Arguments: the sidecar's address, and how the workers of each DataLoader are started. Prints one JSON object. Run as
a process of its own, since gRPC reads ``GRPC_ENABLE_FORK_SUPPORT`` when imported.
"""

import ctypes
import json
import os
import random
import sys
import threading
import time

import crc32c
from torch.utils.data import DataLoader, Dataset

from pannier.client.config import Settings
from pannier.client.engine import engine
from pannier.client.identity import Identity
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import InvalidRequestError

SIZE = 48 << 20
ROUNDS = 3


class Numbers(Dataset[int]):
    """Its items say in which process they were made."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class File:
    name = "f"
    size = SIZE

    def __init__(self) -> None:
        self.data = random.Random(1).randbytes(SIZE)
        self._buffer = ctypes.create_string_buffer(self.data, SIZE)
        self.address = ctypes.addressof(self._buffer)


def fork_and_finalise(session: SidecarClient) -> tuple[float, int]:
    """A child that ends as an interpreter does, atexit and garbage collection included.

    Returns the seconds that the fork took, and the child's exit status.
    """
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            engine().call(lambda: session.plan(sidecar_pb2.PlanRequest(), 1))
        except InvalidRequestError:
            sys.exit(7)
        sys.exit(1)
    forked = time.monotonic() - began
    _, status = os.waitpid(child, 0)
    return forked, os.waitstatus_to_exitcode(status)


def load_data(method: str) -> None:
    """The life of a DataLoader whose workers are started by ``method``."""
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method)
    pids = {int(pid) for batch in loader for pid in batch}
    del loader
    assert len(pids) == 2
    assert os.getpid() not in pids


def main(address: str, *methods: str) -> None:
    who = Identity(job="job", incarnation="a", rank=0, world_size=1, host="h", client="c")
    session = SidecarClient.connect(Settings(sidecar=address), who)
    context = sidecar_pb2.SaveContext(
        save=save_pb2.SaveId(job="job", incarnation="a", group="g", number=1), ranks=[0]
    )
    file = File()
    sent: list[int] = []
    streaming = threading.Event()

    def send() -> None:
        # Again and again, so that there is a stream whenever a fork comes.
        while not sent or not over.is_set():
            file.name = f"f{len(sent)}"
            crc = engine().call(
                lambda: session.send(context, "a", file, progress=lambda _: streaming.set())
            )
            sent.append(int(crc == crc32c.crc32c(file.data)))

    over = threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    streaming.wait(60)

    try:
        for method in methods:
            load_data(method)
        children = [fork_and_finalise(session) for _ in range(ROUNDS)]
    finally:
        # What is raised above would else wait for ever for this thread.
        over.set()
        sender.join(60)
    session.close()
    print(
        json.dumps(
            {
                "forks_s": [child[0] for child in children],
                "exits": [child[1] for child in children],
                "whole": sent,
                "sending": sender.is_alive(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

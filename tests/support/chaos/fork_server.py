"""Where the chaos test's ranks come from: one process that has imported torch, and forks.

Importing torch takes seconds, and a trainer is killed every few of them. What is forked is a
process like any other: it can be killed and stopped alone, and shares nothing with the rest.

In: a line of JSON per process to start, on a socket. Out: a line when it began, and one when it
ended. :class:`Nursery` is the harness's end of that.
"""

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from support.processes.daemons import clean_environment
from support.processes.processes import Process, python
from support.processes.stretch import stretched

_START_S = 60.0


class Child:
    """A process of the nursery."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.status: int | None = None
        """As of ``os.waitstatus_to_exitcode``; None while it runs."""
        self.began = threading.Event()
        self.ended = threading.Event()

    def signal(self, number: signal.Signals) -> None:
        """Nothing when it has ended."""
        if self.status is None and self.began.wait(stretched(_START_S)):
            os.kill(self.pid, number)


class Nursery:
    """``with Nursery(directory) as nursery``; not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: dict[int, Child] = {}
        self._next = 0

    def __enter__(self) -> "Nursery":
        self._socket, theirs = socket.socketpair()
        environment = clean_environment(
            {
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
                ),
            }
        )
        self._process = Process(
            "nursery",
            python("-m", "support.chaos.fork_server", str(theirs.fileno())),
            environment=environment,
            log=self._directory / "nursery.log",
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._thread = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # With it go all that it has started.
        self._process.close()
        self._thread.join(10)
        self._socket.close()

    def start(self, name: str, function: str, arguments: Mapping[str, Any], log: Path) -> Child:
        """Runs ``module:function(arguments)`` in a process; its result is the exit status."""
        self._next += 1
        child = self._children[self._next] = Child(name)
        order = {"id": self._next, "call": function, "with": arguments, "log": str(log)}
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        return child

    def _read(self) -> None:
        try:
            with self._socket.makefile() as lines:
                for line in lines:
                    news = json.loads(line)
                    child = self._children[news["id"]]
                    if "pid" in news:
                        child.pid = news["pid"]
                        child.began.set()
                    else:
                        child.status = news["status"]
                        child.ended.set()
        except ConnectionError:
            return


def _resolve(name: str) -> Callable[[Mapping[str, Any]], int]:
    module, _, function = name.partition(":")
    found: Callable[[Mapping[str, Any]], int] = getattr(importlib.import_module(module), function)
    return found


def _redirect(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def serve(orders: socket.socket) -> int:
    """Until the harness hangs up. In a child it returns the exit status of what that ran."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    running: dict[int, int] = {}
    buffer = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake:
                wake.recv(4096)
                continue
            data = orders.recv(1 << 16)
            if not data:
                return 0
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for thing in (selector, orders, wake, woken):
                        thing.close()
                    _redirect(order["log"])
                    return _run(order)
                running[pid] = order["id"]
                _say(orders, id=order["id"], pid=pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            _say(orders, id=running.pop(pid), status=code)


def _run(order: Mapping[str, Any]) -> int:
    try:
        return _resolve(order["call"])(order["with"])
    except BaseException:  # noqa: BLE001 - a child says why it ends, and ends
        traceback.print_exc()
        return 1


def _say(orders: socket.socket, **news: Any) -> None:
    orders.sendall(json.dumps(news).encode() + b"\n")


def run_rank(arguments: Mapping[str, Any]) -> int:
    """One rank, as :mod:`support.chaos.trainer` describes it."""
    from support.chaos.trainer import Trainer, train

    return train(Trainer(**arguments))


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    # What the children need, loaded once; none of it starts a thread.
    for module in (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "pannier.client",
        "support.chaos.states",
        "support.chaos.trainer",
    ):
        importlib.import_module(module)
    status = serve(orders)
    sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()

"""Python processes without the seconds that their imports take: a server has imported, and forks.

In: an order per process on a socket, with descriptors of its outputs and of a socket of its own. Out:
on the latter, its process id, then its exit status. What is forked is a process like one that was
started by a command: it has its own session, environment, signals and ``__main__``. What tells them
apart: it has its server's command line and first environment in /proc, and its server's seed of
hashes. Tests about these, or about starting, use :class:`support.processes.processes.Process`
without a server.

A server is single-threaded, and ends with all that it has started when its test process ends.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

TESTS: Final = str(Path(__file__).parents[2])

COMMANDS: Final = (
    "pannier.cli.main",
    *(
        f"pannier.cli.commands.{name}"
        for name in (
            *("coordinator", "doctor", "gc", "health", "ls", "recover", "retain", "rm", "sidecar"),
            *("status", "up", "verify", "watch"),
        )
    ),
    "pannier.sidecar.main",
    "gcsfs",
    "aiohttp.web",
    "support.storage.gcs_api",
)
"""Modules of a sidecar, of most commands and of the GCS server, which import no torch."""
TORCH: Final = (
    *COMMANDS,
    # Before numpy: it sets what numpy reads.
    "pannier.coordinator.server",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pannier.client",
    "support.states.sharded_states",
    "support.states.states",
)
"""Modules of a coordinator, of ``pannier recover`` and of ranks."""

STACKS: Final = signal.SIGUSR2
"""A process writes the stacks of its threads to standard error."""
_START_S: Final = 60.0
_ORDER_BYTES: Final = 1 << 18
_INTEGER: Final = struct.Struct("q")
_READ_AT_START: Final = (
    *("CUDA", "GLIBC_", "GRPC_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMPY_", "OMP_"),
    *("OPENBLAS_", "PANNIER_TIME_SCALE", "PYTHON", "TORCH_", "TZ"),
)
"""First letters of variables that an interpreter or a module reads when it is loaded."""
_NEW_NETWORK: Final = 0x40000000
"""CLONE_NEWNET of Linux."""
_NEW_HOSTNAME: Final = 0x04000000
"""CLONE_NEWUTS of Linux."""


class Forked:
    """One process of a server; like ``subprocess.Popen``, whose place it takes. Thread-safe."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.returncode: int | None = None
        channel.settimeout(_START_S)
        self.pid = self._read()
        channel.setblocking(False)

    def _read(self) -> int:
        data = self._channel.recv(_INTEGER.size)
        if not data:
            raise RuntimeError("the fork server ended")
        number: int = _INTEGER.unpack(data)[0]
        return number

    def poll(self) -> int | None:
        """Exit status as of ``Popen``; None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    self.returncode = self._read()
                except BlockingIOError:
                    return None
                self._channel.close()
            return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired when it still runs."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            # In short turns: another thread may take the status, and close the channel.
            with suppress(OSError, ValueError):
                select.select([self._channel], [], [], min(left, 0.5))
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A process that has imported ``modules``. Thread-safe. Use :func:`server_for`."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._orders, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ORDER_BYTES)
        # -c, as what is forked must not find this module as its __main__.
        code = "from support.processes import fork_server; fork_server.main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), *modules],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        out: int,
        err: int,
        cwd: Path | None = None,
        host: tuple[str, str] | None = None,
        stdin: int | None = None,
    ) -> Forked:
        """Runs what ``python`` with these arguments would: a file or ``-m module``, and its own.

        Args:
            arguments: without the interpreter.
            environment: the whole.
            out: descriptor that takes standard output.
            err: descriptor that takes standard error.
            host: network namespace and hostname to run with.
            stdin: descriptor that is standard input; None: empty.
        """
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
            "host": host,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inputs = [] if stdin is None else [stdin]
        with theirs:
            descriptors = [theirs.fileno(), out, err, *inputs]
            socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
        return Forked(ours)

    def close(self) -> None:
        """Ends it and all that it has started."""
        self._orders.close()
        self._process.wait(30)


_servers: dict[tuple[str, ...], ForkServer] = {}
_lock = threading.Lock()


def server_for(modules: tuple[str, ...], environment: Mapping[str, str]) -> ForkServer | None:
    """This test process's server with ``modules``.

    None when an interpreter with that environment would start in another way than the server did.
    """
    mine = _server_environment()
    names = {name for name in (*mine, *environment) if name.startswith(_READ_AT_START)}
    for name in names - {"PYTHONPATH", "PYTHONUNBUFFERED", *_SINGLE_THREADED}:
        if mine.get(name) != environment.get(name):
            return None
    if any(environment.get(name, "1") != "1" for name in _SINGLE_THREADED):
        return None
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    if not {*path} <= {*mine["PYTHONPATH"].split(os.pathsep), ""}:
        return None
    with _lock:
        if modules not in _servers:
            _servers[modules] = ForkServer(modules, mine)
        return _servers[modules]


def modules_of(command: str) -> tuple[str, ...]:
    """What a server for that command of ``pannier`` has imported."""
    return TORCH if command in ("coordinator", "recover") else COMMANDS


def server_pids() -> set[int]:
    """Process ids of this test process's servers."""
    return {server.pid for server in _servers.values()}


_SINGLE_THREADED: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _server_environment() -> dict[str, str]:
    path = [TESTS, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        # A process with several threads can't be forked.
        **dict.fromkeys(_SINGLE_THREADED, "1"),
    }


@atexit.register
def _close_all() -> None:
    for server in _servers.values():
        server.close()
    _servers.clear()


# The server's side.


def main() -> None:
    """Serves until the test process closes its end; in what is forked, runs the order."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import started threads: {threads}"
    # What is shared isn't copied by the first collection in each child.
    gc.collect()
    gc.freeze()
    order = _serve(orders)
    if order is not None:
        _run(order)


def _serve(orders: socket.socket) -> Mapping[str, Any] | None:
    """None at the end; in a child, its order."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake:
                wake.recv(4096)
                continue
            data, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 4)
            if not data:
                _end(running)
                return None
            channel, standard = socket.socket(fileno=descriptors[0]), descriptors[1:]
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for thing in (selector, orders, wake, woken, channel, *running.values()):
                    thing.close()
                order: dict[str, Any] = json.loads(data)
                _detach(standard, order["cwd"])
                return order
            for descriptor in standard:
                os.close(descriptor)
            channel.send(_INTEGER.pack(pid))
            running[pid] = channel
        _reap(running)


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as channel, suppress(BrokenPipeError):
            # Closed already when no process waits for it.
            channel.send(_INTEGER.pack(os.waitstatus_to_exitcode(status)))


def _end(running: dict[int, socket.socket]) -> None:
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)


def _detach(standard: Sequence[int], cwd: str) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(STACKS, all_threads=True)
    for descriptor, number in zip(standard, (1, 2, 0), strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)


def _enter(network: str, hostname: str) -> None:
    # Python itself has these calls from 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as namespace:
        failed = libc.setns(namespace.fileno(), _NEW_NETWORK) or libc.unshare(_NEW_HOSTNAME)
    if failed:
        raise OSError(ctypes.get_errno(), f"{hostname} can't be entered")
    socket.sethostname(hostname)


def _run(order: Mapping[str, Any]) -> None:
    if order["host"] is not None:
        _enter(*order["host"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # The only module of ours that reads the environment when it is imported.
    importlib.reload(importlib.import_module("pannier.common.fault_points"))
    first, *rest = order["arguments"]
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        sys.path[0] = ""
        sys.argv = [first, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
        return
    sys.path[0] = str(Path(first).parent.resolve())
    sys.argv = [first, *rest]
    # For good, unlike runpy's: threads may outlive the script's last line.
    script = types.ModuleType("__main__")
    script.__file__ = first
    sys.modules["__main__"] = script
    code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, script.__dict__)

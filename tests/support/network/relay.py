"""Links between processes on unix sockets that can be cut, and led to another address."""

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from support.processes.stretch import BOUND_S

_PIECE = 1 << 16


class Relay:
    """Listens at ``path`` and passes on to ``upstream``; ``with Relay(...) as relay``."""

    def __init__(self, path: Path, upstream: str) -> None:
        self.address = f"unix://{path}"
        self._path = path
        self._upstream: str | None = upstream.removeprefix("unix://")
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(16)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> "Relay":
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(BOUND_S)
        self._path.unlink(missing_ok=True)

    def cut(self) -> None:
        """Ends all connections, and new ones at once."""
        self._turn(None)

    def lead_to(self, upstream: str) -> None:
        """Ends all connections; new ones go there."""
        self._turn(upstream.removeprefix("unix://"))

    def _turn(self, upstream: str | None) -> None:
        with self._lock:
            self._upstream = upstream
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                theirs = self._connect()
                if theirs is None:
                    ours.close()
                    continue
                self._open |= {ours, theirs}
            ended = threading.Barrier(2, action=lambda a=ours, b=theirs: self._close(a, b))
            for source, sink in ((ours, theirs), (theirs, ours)):
                thread = threading.Thread(
                    target=self._pump, args=(source, sink, ended), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _connect(self) -> socket.socket | None:
        if self._upstream is None:
            return None
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(self._upstream)
        except OSError:
            made.close()
            return None
        return made

    def _pump(self, source: socket.socket, sink: socket.socket, ended: threading.Barrier) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE):
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        ended.wait()

    def _close(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._open -= set(sockets)
            for each in sockets:
                each.close()

"""A Google Cloud Storage server for tests: the documented JSON API on 127.0.0.1, with faults.

In a test::

    with GcsServer(tmp_path, buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        server.fault(kind="status", method="PUT", status=503, times=2)

By hand: ``python -m support.storage.gcs_server --port 0 --dir DIR --bucket NAME`` prints its address.
Its own controls are under ``/_admin/``: ``faults`` (POST a rule, GET, DELETE), ``options``
(PUT), ``requests`` and ``sessions`` (GET).
"""

import argparse
import asyncio
import json
import signal
import socket
import ssl
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from support.network.certificates import Files
from support.processes import fork_server
from support.processes.daemons import clean_environment
from support.processes.processes import Process, python
from support.processes.stretch import BOUND_S
from support.storage.gcs_api import Service


class GcsServer:
    """The server in a separate process; ``with GcsServer(directory, buckets=[...]) as server``.

    Args:
        tls: its certificate; None: in plaintext.
        seed: of the times that its answers take.
    """

    def __init__(
        self,
        directory: Path,
        buckets: Iterable[str] = ("bucket",),
        *,
        host: str = "127.0.0.1",
        tls: Files | None = None,
        seed: int = 0,
    ) -> None:
        self._host = host
        self._seed = seed
        self._tls = tls
        self._directory = directory
        self._buckets = list(buckets)
        self._process: Process | None = None
        self.url = ""

    def __enter__(self) -> "GcsServer":
        self._directory.mkdir(parents=True, exist_ok=True)
        # Bound here: its address is known before it is up.
        with socket.create_server((self._host, 0)) as listening:
            scheme = "https" if self._tls else "http"
            self.url = f"{scheme}://{self._host}:{listening.getsockname()[1]}"
            arguments = ["-m", "support.storage.gcs_server", "--listening"]
            arguments += ["--dir", str(self._directory / "objects"), "--seed", str(self._seed)]
            if self._tls:
                arguments += ["--tls", str(self._tls.cert), str(self._tls.key)]
            arguments += [word for name in self._buckets for word in ("--bucket", name)]
            environment = clean_environment({"PYTHONPATH": str(Path(__file__).parents[2])})
            self._process = Process(
                "gcs server",
                python(*arguments),
                environment=environment,
                log=self._directory / "server.log",
                stdin=listening.fileno(),
                imported=fork_server.COMMANDS,
            )
        try:
            # Else its start, long on a busy machine, would count against the time-outs of those who use it.
            self.faults()
        except BaseException:
            self._process.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.close()

    @property
    def env(self) -> dict[str, str]:
        """What makes gcsfs use it."""
        if self._tls is None:
            return {"STORAGE_EMULATOR_HOST": self.url}
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "SSL_CERT_FILE": str(self._tls.ca),
            # Without credentials, as one does in plaintext.
            "PANNIER_STORAGE_OPTIONS": '{"token": "anon"}',
        }

    @property
    def context(self) -> ssl.SSLContext | None:
        """Of its clients."""
        return None if self._tls is None else ssl.create_default_context(cafile=str(self._tls.ca))

    def fault(self, **rule: Any) -> None:
        """Adds a rule with the fields of :class:`support.storage.gcs_faults.Fault`."""
        self._admin("POST", "faults", rule)

    def faults(self) -> list[dict[str, Any]]:
        """The rules, with how often they were hit."""
        answer: list[dict[str, Any]] = self._admin("GET", "faults")
        return answer

    def clear(self) -> None:
        """Removes all rules."""
        self._admin("DELETE", "faults")

    def release(self) -> None:
        """Ends the delays; the other rules stay."""
        self._admin("PUT", "faults")

    def options(self, **options: bool) -> None:
        """``ignore_preconditions`` (of writes and deletes), ``ignore_delete_preconditions``,
        ``ignore_checksums``.
        """
        self._admin("PUT", "options", options)

    def requests(self) -> list[list[str]]:
        """Method, path with query, and Content-Range or Range of the latest requests."""
        answer: list[list[str]] = self._admin("GET", "requests")
        return answer

    def sessions(self) -> list[str]:
        """Ids of unfinished uploads."""
        answer: list[str] = self._admin("GET", "sessions")
        return answer

    def _admin(self, method: str, what: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/_admin/{what}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=BOUND_S, context=self.context) as response:
            return json.loads(response.read())


async def serve(
    service: Service, listening: socket.socket, tls: ssl.SSLContext | None = None
) -> None:
    """Serves until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(service.app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, listening, ssl_context=tls).start()
    print(f"{'https' if tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await ended.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--listening", action="store_true", help="standard input is the socket")
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--bucket", action="append", default=[])
    arguments = parser.parse_args()
    if arguments.listening:
        listening = socket.socket(fileno=0)
    else:
        listening = socket.create_server(("127.0.0.1", arguments.port))
    tls = None
    if arguments.tls:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*arguments.tls)
    service = Service(arguments.dir, arguments.bucket, arguments.seed)
    asyncio.run(serve(service, listening, tls))


if __name__ == "__main__":
    main()

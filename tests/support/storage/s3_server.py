"""moto's S3 on 127.0.0.1, in threads of this process, with the faults of :mod:`support.storage.gcs_faults`."""

import base64
import io
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import boto3
import crc32c
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from support.processes.stretch import BOUND_S
from support.storage.gcs_faults import Fault, Faults
from support.storage.jitter import Jitter

_CHECKSUM = ("HTTP_X_AMZ_CHECKSUM", "HTTP_X_AMZ_SDK_CHECKSUM", "HTTP_X_AMZ_TRAILER")
_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}

Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """No log."""

    def log_error(self, format: str, *args: Any) -> None:
        """What was cut on purpose."""


class _Cut(Exception):
    """The connection is to be reset."""


class _Faulty:
    """Another WSGI application behind the rules of ``faults``."""

    def __init__(self, app: App, faults: Faults, jitter: Jitter) -> None:
        self._app = app
        self.faults = faults
        self.ignore_checksums = False
        self.lists_by_key = False
        self.refuse_checksums = False
        self._jitter = jitter
        self._lock = threading.Lock()
        self.requests: list[list[str]] = []
        self.ended = threading.Event()

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["REQUEST_URI"]
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        fault = self.faults.find(method, path, security_token=token)
        self.requests.append([method, path])
        before_s, after_s = self._jitter.next_s()
        time.sleep(before_s)
        try:
            parts = self._serve(environ, start_response, fault)
            time.sleep(after_s)
            # As real servers: also an error is without its text.
            return [] if method == "HEAD" else parts
        except _Cut:
            reset(environ["werkzeug.socket"])
            raise ConnectionResetError("cut by a fault") from None

    def _serve(
        self, environ: Environ, start_response: Callable[..., Any], fault: Fault | None
    ) -> Iterable[bytes]:
        kind = fault.kind if fault else ""
        if kind == "delay":
            assert fault is not None
            self.ended.wait(fault.seconds)
        if kind == "reset":
            raise _Cut
        body = environ["wsgi.input"]
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if kind == "partial":
            assert fault is not None
            body.read(min(fault.bytes, length))
            raise _Cut
        data = body.read(length)
        if kind == "status":
            assert fault is not None
            return answer(start_response, fault)
        if self.refuse_checksums and any(name.startswith(_CHECKSUM) for name in environ):
            text = "A header you provided implies functionality that is not implemented."
            return answer(
                start_response, Fault("status", status=501, code="NotImplemented", message=text)
            )
        if kind == "corrupt" and data:
            data = data[:-1] + bytes([data[-1] ^ 0x10])
        sent = environ.get("HTTP_X_AMZ_CHECKSUM_CRC32C")
        if sent and data and environ["REQUEST_METHOD"] == "PUT":
            # moto takes the client's word.
            found = base64.b64encode(crc32c.crc32c(data).to_bytes(4, "big")).decode()
            environ["HTTP_X_AMZ_CHECKSUM_CRC32C"] = found
            if found != sent and not self.ignore_checksums:
                text = "The CRC32C you specified did not match the calculated checksum."
                refused = Fault("status", status=400, code="BadDigest", message=text)
                return answer(start_response, refused)
        environ["wsgi.input"] = io.BytesIO(data)
        began: list[Any] = []
        # One request at a time: moto looks and puts in two steps.
        with self._lock:
            parts = list(self._app(environ, lambda *rest: began.append(rest)))
        if kind == "lost":
            raise _Cut
        if kind == "answered":
            assert fault is not None
            return answer(start_response, fault)
        if self.lists_by_key and "uploads&prefix=" in environ["REQUEST_URI"]:
            parts = [only_of_key(b"".join(parts), environ["QUERY_STRING"])]
            began[0] = (began[0][0], [("Content-Type", "application/xml")])
        if kind == "corrupt" and not data and parts:
            parts[-1] = parts[-1][:-1] + bytes([parts[-1][-1] ^ 0x10])
        start_response(*began[0])
        return parts


def answer(start_response: Callable[..., Any], fault: Fault) -> Iterable[bytes]:
    """An error in S3's form; without a code, the fault's body."""
    body = fault.body
    if fault.code:
        text = f"<Code>{escape(fault.code)}</Code><Message>{escape(fault.message)}</Message>"
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error>{text}</Error>'
    given = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    headers = [*given, *(fault.headers or {}).items()]
    start_response(f"{fault.status} {fault.code or 'OK'}", headers)
    return [body.encode()]


def only_of_key(listing: bytes, query: str) -> bytes:
    """A listing of uploads without those whose key only begins with the prefix."""
    (prefix,) = parse_qs(query)["prefix"]
    if f"<Key>{escape(prefix)}</Key>".encode() in listing:
        return listing
    return (
        b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
    )


def reset(connection: socket.socket) -> None:
    """Ends a connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Its handler keeps the connection open, and would parse an unread body as the next request.
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class S3Server:
    """``with S3Server() as server``; has the bucket ``bucket``.

    Args:
        seed: of the times that its answers take.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def __enter__(self) -> "S3Server":
        self._app = _Faulty(
            DomainDispatcherApplication(create_backend_app), Faults(), Jitter(self._seed)
        )
        self._server = make_server("127.0.0.1", 0, self._app, threaded=True, request_handler=_Quiet)
        # Otherwise its shutdown waits for handlers with an unresponsive peer.
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **_KEYS)
        # moto keeps what it has in this process, for whichever server comes next.
        request = urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=BOUND_S).close()
        self.client.create_bucket(Bucket="bucket")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._app.ended.set()
        self.client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def options(self) -> dict[str, object]:
        """Storage options."""
        return {"key": "test", "secret": "test", "endpoint_url": self.url}

    @property
    def env(self) -> dict[str, str]:
        """What makes s3fs use it."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            **{name.upper(): value for name, value in _KEYS.items()},
        }

    def fault(self, **rule: Any) -> None:
        """Adds a rule with the fields of :class:`support.storage.gcs_faults.Fault`, but ``content_range``.

        Without a ``code``, an answer has ``body`` instead of an error.
        """
        self._app.faults.add(**rule)

    def faults(self) -> list[dict[str, Any]]:
        """The rules, with how often they were hit."""
        return self._app.faults.json()

    def clear(self) -> None:
        """Removes all rules."""
        self._app.faults.clear()
        self._app.ignore_checksums = self._app.lists_by_key = self._app.refuse_checksums = False

    def list_uploads_by_key(self) -> None:
        """Until :meth:`clear`: uploads are listed by their exact key only, as MinIO does."""
        self._app.lists_by_key = True

    def ignore_checksums(self) -> None:
        """Until :meth:`clear`: what arrives is kept whatever checksum was sent along."""
        self._app.ignore_checksums = True

    def refuse_checksums(self) -> None:
        """Until :meth:`clear`: a request with a header about checksums is answered by 501."""
        self._app.refuse_checksums = True

    def requests(self) -> list[list[str]]:
        """Method and path with query, of all."""
        return list(self._app.requests)

    def sessions(self) -> list[str]:
        """Ids of unfinished multipart uploads."""
        found = self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", ())
        return [upload["UploadId"] for upload in found]

    def names(self, prefix: str) -> list[str]:
        """Of the bucket's objects."""
        found = self.client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", ())
        return [item["Key"] for item in found]

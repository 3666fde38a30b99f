"""Requests to Google Cloud Storage, or another server of its JSON API, over gcsfs.

Credentials, endpoint and session are gcsfs'; the requests are made beneath its ``_call``, which tries six
times in 33 s without a report, has no time-out, and drops the body of a 404 or 412. Requests that carry data
files are sent in upload threads, beside the session. Errors that may pass are raised as TransientError, which
:mod:`pannier.storage.retry` retries.
"""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from inspect import signature
from typing import Any
from urllib.parse import quote, urlencode

from pannier.common import timeouts
from pannier.common.machine import credentials_may_be_late

# Before the import: otherwise gcsfs requests the bucket's layout over gRPC at first use.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

import aiohttp
import google.auth.exceptions
import google.auth.transport.requests
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError, NonRetryableError
from yarl import URL

from pannier.common.deadline import within
from pannier.storage.base import DeniedError, HeldError, NotFoundError, StorageError, notify_retry
from pannier.storage.connections import SharedConnection, check_names
from pannier.storage.http_body import FromSpool, Slices
from pannier.storage.http_sender import SLOWEST_BYTES_PER_S, HttpSender
from pannier.storage.io_threads import BUFFER, setup_threads
from pannier.storage.retry import TransientError, asked_pause_s
from pannier.storage.upload_threads import UploadThreads
from pannier.wire.errors import ConfigurationError

_CHUNK = 32 << 20
_OPTIONS = {
    *signature(GCSFileSystem.__init__).parameters,
    # It passes these on to fsspec's base class, which ignores all others.
    *("batch_size", "listings_expiry_time", "max_paths", "skip_instance_cache"),
    "use_listings_cache",
} - {"self", "kwargs"}
_PROVIDER_TEXT = 500
_RATE_LIMITS = {"rateLimitExceeded", "userRateLimitExceeded"}
_HOLDS = {"objectUnderActiveHold", "retentionPolicyNotMet"}
"""Reasons of a 403 that aren't missing permissions."""
_CREDENTIALS_HINT = (
    "check which credentials are in use (storage option 'token', "
    "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account) and that they may create, "
    "read, list and delete objects there (roles/storage.objectUser)"
)


class PreconditionError(StorageError):
    """412: ifGenerationMatch didn't hold."""


class UnclearError(StorageError):
    """200 to a write, but the body is not the object's resource."""


class ChecksumRefusedError(StorageError):
    """400: the server's crc32c of the received bytes differs from the one in the request."""


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    authorization: str = ""
    """Authorization header of the request."""

    def json(self) -> dict[str, Any]:
        """The body's JSON object. Raises TransientError when it is cut short."""
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise TransientError(f"an answer that isn't JSON: {self.body[:100]!r}") from error
        if not isinstance(value, dict):
            raise TransientError(f"an answer that isn't a JSON object: {self.body[:100]!r}")
        return value

    def resource(self, what: str) -> dict[str, Any]:
        """The resource of the written object. Raises UnclearError when the body isn't one."""
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict) or not {"name", "generation"} <= value.keys():
            raise UnclearError(
                f"{what}: {self.status} with {self.body[:100]!r} instead of the object's resource"
            )
        return value


class GcsConnection:
    """An authenticated session, and a sender of data files beside it; for one event loop."""

    def __init__(self, fs: GCSFileSystem, threads: UploadThreads) -> None:
        self._fs = fs
        self._sender = _make_sender(fs, threads)

    @classmethod
    async def open(cls, options: Mapping[str, Any], threads: UploadThreads) -> "GcsConnection":
        """Finds credentials as gcsfs does, and opens a session.

        Without the option ``token``, no credentials are sent to a plain-HTTP endpoint.
        Raises ConfigurationError or DeniedError.
        """
        endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST", "")
        settings = {"use_listings_cache": False, **options}
        if endpoint not in ("", "default") and not endpoint.startswith("https://"):
            settings.setdefault("token", "anon")
        check_names(options, _OPTIONS, "storage_options of gcsfs")
        settings.update(asynchronous=True, skip_instance_cache=True)
        try:
            fs = await setup_threads.run(partial(GCSFileSystem, **settings))
            session = await fs._set_session()
            # Otherwise aiohttp sends a whole chunk again when a connection breaks, without a report.
            session._retry_connection = False
        except (TypeError, ValueError, OSError, google.auth.exceptions.GoogleAuthError) as error:
            if isinstance(
                error, google.auth.exceptions.GoogleAuthError
            ) and credentials_may_be_late(os.environ):
                raise TransientError(f"{error}; {_CREDENTIALS_HINT}", answered=False) from error
            raise ConfigurationError(
                f"Google Cloud Storage can't be set up: {error}; check the storage options and the "
                "GOOGLE_* and STORAGE_EMULATOR_HOST variables"
            ) from error
        connection = cls(fs, threads)
        if (
            fs.credentials.credentials is None
            and settings.get("token") is None
            and credentials_may_be_late(os.environ)
        ):
            # gcsfs goes on as an anonymous user.
            await connection.close()
            raise TransientError(
                f"no credentials were found (for a public bucket, give the storage option token=anon); {_CREDENTIALS_HINT}",
                answered=False,
            )
        return connection

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of a data file in one request."""
        # Without a sender, gcsfs' session sends them from memory.
        return BUFFER if self._sender is None else _CHUNK

    async def close(self) -> None:
        """Ends the session."""
        if self._sender is not None:
            self._sender.close()
        await self._fs.session.close()

    @property
    def endpoint(self) -> str:
        """Without a trailing slash."""
        return str(self._fs._location).rstrip("/")

    def object_url(self, bucket: str, name: str | None = None, *, area: str = "") -> str:
        """URL of an object or, without a name, of the bucket's collection of objects.

        ``area``: ``/upload`` or ``/download``.
        """
        tail = "" if name is None else f"/{quote(name, safe='')}"
        return f"{self.endpoint}{area}/storage/v1/b/{quote(bucket, safe='')}/o{tail}"

    def bucket_url(self, bucket: str, part: str) -> str:
        """URL of a subresource of a bucket, like its ``storageLayout``."""
        return f"{self.endpoint}/storage/v1/b/{quote(bucket, safe='')}/{part}"

    async def request(
        self,
        method: str,
        url: str,
        *,
        what: str,
        params: Mapping[str, str | None] | None = None,
        headers: Mapping[str, str] | None = None,
        data: Slices | FromSpool | None = None,
        upload: bool = False,
        expected: tuple[int, ...] = (200,),
    ) -> Answer:
        """One request, once.

        Args:
            what: names the object in errors.
            params: added to the URL with the account to bill; None for a URL from the server.
            upload: ``data`` is of a data file: it is sent in an upload thread.
            expected: statuses of success; others raise.

        Raises:
            TransientError, DeniedError, HeldError, NotFoundError, PreconditionError,
            ChecksumRefusedError, StorageError

        When a token is refused before it expires, a new one is fetched, and the request repeated, once.
        """
        if params is not None:
            billed = self._fs._get_params(dict(params))
            url = f"{url}?{urlencode(billed)}" if billed else url
        once = partial(self._upload if upload and self._sender else self._exchange, method, url)
        answer = await once(headers, data, what)
        if answer.status == 401 and answer.authorization:
            refused = _error(answer, what)
            await self._renew(answer.authorization, refused)
            answer = await once(headers, data, what)
        if answer.status not in expected:
            raise _error(answer, what)
        return answer

    async def _upload(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        data: Slices | FromSpool | None,
        what: str,
    ) -> Answer:
        """As :meth:`_exchange`, in an upload thread."""
        assert self._sender is not None
        authorized = await self._authorized(headers)
        try:
            found = await self._sender.send(method, url, authorized, data or Slices())
        except ssl.SSLCertVerificationError as error:
            raise StorageError(f"{what}: {error}") from error
        except asyncio.TimeoutError as error:
            raise TransientError(f"{what}: {self.endpoint} {error}", answered=False) from error
        except (OSError, HTTPException) as error:
            raise self._broken(what, error) from error
        return Answer(found.status, found.headers, found.body, authorized.get("authorization", ""))

    async def _exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        data: Slices | FromSpool | None,
        what: str,
    ) -> Answer:
        """An answer of any status. Raises TransientError, DeniedError, StorageError."""
        body = await data.loaded() if isinstance(data, FromSpool) else data or Slices()
        limit_s = (
            timeouts.STORAGE_CONNECT_S
            + timeouts.STORAGE_IDLE_S
            + (body.size or 0) / SLOWEST_BYTES_PER_S
        )
        body.moved = began = time.monotonic()
        try:
            return await within(
                limit_s,
                self._once(method, url, headers, None if data is None else body),
                # A peer that accepts no bytes for so long has stalled.
                sooner=lambda: body.moved + timeouts.STORAGE_CONNECT_S + timeouts.STORAGE_IDLE_S,
            )
        except asyncio.TimeoutError as error:
            raise TransientError(
                f"{what}: {self.endpoint} did not answer for "
                f"{time.monotonic() - max(began, body.moved):.0f} s",
                answered=False,
            ) from error
        except (aiohttp.InvalidURL, aiohttp.ClientConnectorCertificateError) as error:
            raise StorageError(f"{what}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(what, error) from error

    def _broken(self, what: str, error: Exception) -> TransientError:
        return TransientError(
            f"{what}: connection to {self.endpoint}: {type(error).__name__}: {error}",
            answered=False,
        )

    async def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        data: Slices | None,
    ) -> Answer:
        authorized = await self._authorized(headers)
        async with self._fs.session.request(
            method,
            URL(url, encoded=True),
            headers=authorized,
            data=data,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=timeouts.STORAGE_CONNECT_S,
                sock_read=timeouts.STORAGE_IDLE_S,
            ),
        ) as response:
            return Answer(
                response.status,
                response.headers,
                await response.read(),
                authorized.get("authorization", ""),
            )

    async def _authorized(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        credentials = self._fs.credentials
        try:
            if credentials.credentials is not None:
                # May fetch a token, with blocking calls.
                await setup_threads.run(credentials.maybe_refresh)
            authorized: dict[str, str] = self._fs._get_headers(headers)
        except (HttpError, NonRetryableError, google.auth.exceptions.GoogleAuthError) as error:
            raise _token_error("", error) from error
        return authorized

    async def _renew(self, authorization: str, refused: StorageError) -> None:
        """Replaces a refused token, unless another request has."""
        credentials = self._fs.credentials.credentials
        if credentials is None:
            raise refused
        notify_retry(f"{refused}; fetching another token")
        try:
            await setup_threads.run(_refresh, self._fs.credentials, authorization)
        except google.auth.exceptions.GoogleAuthError as error:
            raise _token_error(f"{refused}; ", error) from error


def _token_error(text: str, error: BaseException) -> StorageError:
    """The error for a token that can't be fetched: transient if its server is down or overloaded."""
    chain = [error]
    # gcsfs shows another error than google-auth's, which shows another than its transport's.
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    found = [each for each in chain if isinstance(each, google.auth.exceptions.GoogleAuthError)]
    text += f"no token could be fetched: {found[0] if found else error}"
    if any(map(_is_transient, found)):
        return TransientError(text, answered=False)
    return DeniedError(f"{text}; {_CREDENTIALS_HINT}")


def _is_transient(error: google.auth.exceptions.GoogleAuthError) -> bool:
    if not isinstance(error, google.auth.exceptions.TransportError):
        return bool(error.retryable)
    # Only an answer that refuses is passed on, as the last argument.
    status: int = getattr(error.args[-1] if error.args else None, "status", 503)
    return status >= 500


def _refresh(credentials: Any, authorization: str) -> None:
    """Blocking; ``credentials`` are gcsfs'."""
    with credentials.lock:
        current: dict[str, str] = {}
        credentials.credentials.apply(current)
        if current.get("authorization") == authorization:
            credentials.credentials.refresh(google.auth.transport.requests.Request())
            credentials.credentials.apply(credentials.heads)


def _error(answer: Answer, what: str) -> StorageError:
    message = _provider_text(answer)
    text = f"{what}: {answer.status} {message}"
    status = answer.status
    reasons = _reasons(answer)
    limited = status == 403 and reasons & _RATE_LIMITS
    if status in (408, 429) or limited or (status >= 500 and status != 501):
        return TransientError(text, asked_pause_s(answer.headers))
    if status == 403 and reasons & _HOLDS:
        return HeldError(
            f"{text}; the object is under a hold or a retention policy and can't be replaced or "
            "removed: release the hold (gcloud storage objects update --no-temporary-hold "
            "--no-event-based-hold), or wait for its retention period to end"
        )
    if status in (401, 403):
        return DeniedError(f"{text}; {_CREDENTIALS_HINT}")
    if status in (404, 410):
        return NotFoundError(f"{text}; check the bucket's name, and the object's")
    if status == 412:
        return PreconditionError(text)
    if status == 400 and "crc32c" in message.lower():
        return ChecksumRefusedError(text)
    return StorageError(text)


def _provider_text(answer: Answer) -> str:
    text = answer.body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError):
        pass  # Not the documented form: the raw text.
    return text[:_PROVIDER_TEXT]


def _reasons(answer: Answer) -> set[str]:
    """Reasons of an error in the documented form; otherwise empty."""
    try:
        return {str(item["reason"]) for item in json.loads(answer.body)["error"]["errors"]}
    except (ValueError, KeyError, TypeError):
        return set()


def _make_sender(fs: GCSFileSystem, threads: UploadThreads) -> HttpSender | None:
    """A sender that connects as gcsfs' session would; None: the user has configured the session.

    For example, with a proxy.
    """
    # With all that gcsfs has found, such as a client certificate.
    tls = getattr(fs.session.connector, "_ssl", None)
    if fs.session_kwargs or not (tls is True or isinstance(tls, ssl.SSLContext)):
        return None
    return HttpSender(threads, _default_tls if tls is True else lambda: tls)


def _default_tls() -> ssl.SSLContext:
    """A TLS context like aiohttp's default."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(("http/1.1",))
    return context


def shared_connection(
    options: Mapping[str, Any], threads: UploadThreads
) -> SharedConnection[GcsConnection]:
    """A reference to the connection for these options."""
    key = json.dumps(
        ["gs", options, os.environ.get("STORAGE_EMULATOR_HOST", ""), id(threads)],
        sort_keys=True,
        default=repr,
    )
    return SharedConnection(key, lambda: GcsConnection.open(options, threads), GcsConnection.close)

"""Requests to S3 over s3fs' client, each made once, with errors of :mod:`pannier.storage`.

s3fs provides credentials, endpoint and the account to bill. Its retries and botocore's are off:
:mod:`pannier.storage.retry` retries. Requests with data files, which botocore signs, are sent in upload
threads.
"""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Iterable, Mapping
from functools import partial
from http.client import HTTPException
from typing import Any

import aiohttp
import botocore.exceptions as boto
from aiobotocore.awsrequest import AioAWSResponse
from botocore.httpsession import get_cert_path
from botocore.parsers import ResponseParserError
from botocore.utils import get_environ_proxies
from s3fs import S3FileSystem

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.common.machine import credentials_may_be_late
from pannier.storage.base import DeniedError, NotFoundError, StorageError, notify_retry
from pannier.storage.connections import SharedConnection, check_names
from pannier.storage.http_body import Part, Slices
from pannier.storage.http_sender import SLOWEST_BYTES_PER_S, HttpSender
from pannier.storage.io_threads import setup_threads
from pannier.storage.retry import TransientError, UploadLostError, asked_pause_s
from pannier.storage.upload_threads import UploadThreads
from pannier.wire.errors import ConfigurationError

_CREDENTIALS_HINT = (
    "check which credentials are in use (storage options 'key' and 'secret' or 'profile', "
    "AWS_* variables, or the machine's role) and that they may put, get, list and delete objects "
    "and list and abort multipart uploads there"
)
_TRANSIENT = {
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
# A machine's metadata server is asked once otherwise, for a second.
os.environ.setdefault("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "3")

_STARTED = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
"""When this process began to use S3."""

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_NOT_THERE = {"NotImplemented", "UnsupportedArgument"}
_CHECKSUM = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"}
_CALCULATION = "request_checksum_calculation"
_FIELDS = {
    "create_multipart_upload": ("UploadId",),
    "head_object": ("ContentLength", "ETag", "LastModified"),
    "list_multipart_uploads": ("IsTruncated",),
    "list_objects_v2": ("IsTruncated",),
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
}
"""Fields without which an answer isn't S3's: botocore reads an empty or foreign XML body as one without fields."""
_OPERATIONS = (
    "AbortMultipartUpload",
    "CompleteMultipartUpload",
    "CreateMultipartUpload",
    "DeleteObject",
    "GetObject",
    "HeadObject",
    "ListMultipartUploads",
    "ListObjectsV2",
    "PutObject",
    "UploadPart",
)
"""Operations that :meth:`S3Connection.call` is used for."""
_SHOWN = 100
"""Characters of a foreign answer that an error shows."""
_UPLOADS = ("before-send.s3.PutObject", "before-send.s3.UploadPart")
"""botocore's events whose handlers may send the request themselves."""
_OF_THE_SESSION = {"proxies", "proxies_config", "client_cert", "connector_args", "http_session_cls"}
"""Settings of botocore for connections, which only its own session follows."""


class PreconditionError(StorageError):
    """412: If-Match or If-None-Match didn't hold."""


class ChecksumRefusedError(StorageError):
    """The server's checksum of the received bytes differs from the one in the request."""


class CredentialsError(DeniedError):
    """The session token has expired, or no credentials were found; another look may find new ones."""


class NoneFoundError(CredentialsError):
    """No credentials were found."""


class BeyondEndError(StorageError):
    """416: the object ends before the requested range."""


class S3Connection:
    """A client, and a sender of data files beside it; for one event loop.

    Args:
        sends_checksums: False for a store that refuses their headers.
    """

    def __init__(
        self, fs: S3FileSystem, sender: HttpSender | None, *, sends_checksums: bool = True
    ) -> None:
        self._fs = fs
        self._sender = sender
        self._clients = [fs._s3creator]
        """All clients; running requests may use an older one."""
        self._renewing = asyncio.Lock()
        self._sends_checksums = sends_checksums

    @classmethod
    async def open(cls, options: Mapping[str, Any], threads: UploadThreads) -> "S3Connection":
        """Finds credentials as s3fs does. Raises ConfigurationError, TransientError."""
        settings = {"use_listings_cache": False, **options}
        settings["config_kwargs"] = {
            "connect_timeout": timeouts.STORAGE_CONNECT_S,
            "read_timeout": timeouts.STORAGE_IDLE_S,
            "max_pool_connections": 64,
            _CALCULATION: "when_required",
            "response_checksum_validation": "when_required",
            **settings.get("config_kwargs", {}),
            "retries": {"total_max_attempts": 1},
        }
        settings.update(asynchronous=True, skip_instance_cache=True)
        try:
            fs = await setup_threads.run(partial(S3FileSystem, **settings))
            await fs.set_session()
        except boto.CredentialRetrievalError as error:
            raise _retrieval_error(error) from error
        except (TypeError, ValueError, KeyError, OSError, boto.BotoCoreError) as error:
            raise ConfigurationError(
                f"S3 can't be set up: {error}; check the storage options and the AWS_* variables"
            ) from error
        # As AWS's SDKs let a user choose it:
        # https://docs.aws.amazon.com/sdkref/latest/guide/feature-dataintegrity.html
        chosen = options.get("config_kwargs", {}).get(_CALCULATION)
        chosen = chosen or fs.session.get_config_variable(_CALCULATION)
        connection = cls(
            fs,
            _make_sender(fs, settings, threads),
            sends_checksums=str(chosen).lower() != "when_required",
        )
        try:
            _check_parameters(fs)
        except ConfigurationError:
            await connection.close()
            raise
        return connection

    async def close(self) -> None:
        """Closes the clients' connections."""
        if self._sender is not None:
            self._sender.close()
        while self._clients:
            await self._clients.pop().__aexit__(None, None, None)

    async def call(
        self, operation: str, *, what: str, size: int = 0, **arguments: Any
    ) -> dict[str, Any]:
        """One call of a client method, without retries; the answer's ``Body`` is read completely.

        Args:
            operation: ``put_object``.
            what: names the object in errors.
            size: bytes of the request's or answer's body.

        Raises:
            TransientError, DeniedError, NotFoundError, PreconditionError, BeyondEndError,
            ChecksumRefusedError, StorageError

        When a token has expired or there is none, credentials are looked up again, and the call
        repeated, once.
        """
        refused = self._fs._s3creator
        try:
            return await self._call(operation, what, size, arguments)
        except CredentialsError as error:
            notify_retry(f"{error}; looking for other credentials")
            await self._renew(refused)
            try:
                return await self._call(operation, what, size, arguments)
            except NoneFoundError as still:
                if not credentials_may_be_late(os.environ):
                    raise
                raise TransientError(str(still), answered=False) from still

    async def _renew(self, refused: Any) -> None:
        """Looks credentials up again, unless another call has. Raises DeniedError, TransientError."""
        async with self._renewing:
            if self._fs._s3creator is not refused:
                return
            try:
                await self._fs.set_session(refresh=True)
            except boto.CredentialRetrievalError as error:
                raise _retrieval_error(error) from error
            except (OSError, ValueError, boto.BotoCoreError) as error:
                raise DeniedError(
                    f"no other credentials were found: {error}; {_CREDENTIALS_HINT}"
                ) from error
            self._clients.append(self._fs._s3creator)

    async def _call(
        self, operation: str, what: str, size: int, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        limit_s = timeouts.STORAGE_CONNECT_S + timeouts.STORAGE_IDLE_S + size / SLOWEST_BYTES_PER_S
        try:
            answer = await within(limit_s, self._once(operation, arguments))
        except boto.ClientError as error:
            raise _error(error, what) from error
        except boto.NoCredentialsError as error:
            # Also when the machine's metadata server did not answer in time.
            raise NoneFoundError(f"{what}: {error}; {_CREDENTIALS_HINT}") from error
        except (boto.PartialCredentialsError, boto.TokenRetrievalError) as error:
            raise DeniedError(f"{what}: {error}; {_CREDENTIALS_HINT}") from error
        except boto.CredentialRetrievalError as error:
            raise _retrieval_error(error) from error
        except boto.SSLError as error:
            raise StorageError(f"{what}: {error}") from error
        except asyncio.TimeoutError as error:
            problem = str(error) or f"no answer within {limit_s:.0f} s"
            raise TransientError(f"{what}: {problem}", answered=False) from error
        except (
            boto.ConnectionError,
            boto.HTTPClientError,
            boto.ResponseStreamingError,
            aiohttp.ClientError,
            OSError,
        ) as error:
            raise TransientError(
                f"{what}: {type(error).__name__}: {error}", answered=False
            ) from error
        except boto.BotoCoreError as error:
            raise StorageError(f"{what}: {error}") from error
        except (ResponseParserError, ValueError) as error:
            raise TransientError(
                f"{what}: an answer that isn't S3's: {str(error)[:_SHOWN]}"
            ) from error
        check_fields(answer, _FIELDS.get(operation, ()), f"{what}: the answer to {operation}")
        return answer

    async def _once(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        client = await self._fs.get_s3(arguments["Bucket"])
        if self._sender is not None and isinstance(arguments.get("Body"), Part):
            for event in _UPLOADS:
                # Once per client.
                client.meta.events.register(event, self._send, unique_id=f"pannier-{event}")
        if not self._sends_checksums:
            arguments = _without_checksums(arguments)
        method = getattr(client, operation)
        answer: dict[str, Any] = await method(**self._fs._get_s3_method_kwargs(method, **arguments))
        if "Body" in answer:
            async with answer["Body"] as body:
                answer["Body"] = await body.read()
        return answer

    async def _send(self, request: Any, **_: Any) -> AioAWSResponse | None:
        """Sends a signed request in an upload thread; None: botocore's session is to send it."""
        if not isinstance(request.body, Part) or get_environ_proxies(request.url):
            return None
        assert self._sender is not None
        headers = {
            name: value.decode() if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
        }
        try:
            found = await self._sender.send(
                request.method, request.url, headers, Slices(request.body)
            )
        except ssl.SSLCertVerificationError as error:
            raise boto.SSLError(endpoint_url=request.url, error=error) from error
        except HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        lower = {name.lower(): value for name, value in found.headers.items()}
        return AioAWSResponse(request.url, found.status, lower, _Read(found.body))


def _without_checksums(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments without checksums: the store compares uploads by reading them back."""
    kept = {name: value for name, value in arguments.items() if not name.startswith("Checksum")}
    if "MultipartUpload" in kept:
        parts = kept["MultipartUpload"]["Parts"]
        kept["MultipartUpload"] = {"Parts": [_without_checksums(part) for part in parts]}
    return kept


def check_fields(answer: Mapping[str, Any], fields: Iterable[str], what: str) -> None:
    """Raises TransientError unless a part of an answer has these fields; ``what`` names the part."""
    if lacking := [field for field in fields if field not in answer]:
        raise TransientError(f"{what} has no {', '.join(lacking)}: does an S3 server answer there?")


def _check_parameters(fs: S3FileSystem) -> None:
    """Raises ConfigurationError for an additional parameter that s3fs would drop: no operation takes it."""
    model = fs._s3.meta.service_model
    known = {
        name
        for operation in _OPERATIONS
        for name in model.operation_model(operation).input_shape.members
    }
    check_names(fs.s3_additional_kwargs, known, "s3_additional_kwargs: S3")


class _Read:
    """The body of a response, as botocore reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        """All of it."""
        return self._body


def _make_sender(
    fs: S3FileSystem, settings: Mapping[str, Any], threads: UploadThreads
) -> HttpSender | None:
    """A sender that connects as botocore's session would; None: the user has configured the session.

    For example, with a proxy.
    """
    verify = settings.get("client_kwargs", {}).get("verify")
    if verify is None:
        verify = fs.session.get_config_variable("ca_bundle") or True
    if verify is False or _OF_THE_SESSION & settings["config_kwargs"].keys():
        return None
    return HttpSender(threads, lambda: ssl.create_default_context(cafile=get_cert_path(verify)))


def _retrieval_error(error: boto.CredentialRetrievalError) -> TransientError:
    """The error when a provider of credentials, such as a pod's agent, fails."""
    return TransientError(f"{error}; {_CREDENTIALS_HINT}", answered=False)


def _environments_keys() -> str:
    """Whose keys they are, where the environment has them: they stay as long as the process."""
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        return ""
    return (
        f"; these are AWS_ACCESS_KEY_ID and what belongs to it in the environment of process {os.getpid()}, as of "
        f"{_STARTED}: where the keys have changed since then, start it again (embedded daemons: `pannier down`; "
        "the next save starts them with its own keys), or use a profile (AWS_PROFILE), which is read again"
    )


def _error(error: boto.ClientError, what: str) -> StorageError:
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(error.response.get("Error", {}).get("Code", ""))
    text = f"{what}: {status} {code} {error.response.get('Error', {}).get('Message', '')}".rstrip()
    if code in _CHECKSUM or (code == "InvalidRequest" and "checksum" in text.lower()):
        return ChecksumRefusedError(text)
    if code in _TRANSIENT or status in (408, 429) or (status >= 500 and status != 501):
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return TransientError(text, asked_pause_s(headers))
    # An answer to HEAD has no body that names the reason.
    if code in _EXPIRED or code == "400":
        return CredentialsError(f"{text}; {_CREDENTIALS_HINT}{_environments_keys()}")
    if status in (401, 403):
        return DeniedError(f"{text}; {_CREDENTIALS_HINT}")
    if code == "NoSuchUpload":
        return UploadLostError(text)
    if status == 404:
        return NotFoundError(f"{text}; check the bucket's name, and the object's")
    if status == 416:
        return BeyondEndError(text)
    if status == 412:
        return PreconditionError(text)
    if status == 501 or code in _NOT_THERE:
        text += (
            "; this S3-compatible store lacks what Pannier needs: conditional writes (If-None-Match, If-Match) and "
            "the checksum header x-amz-checksum-crc32c; use a newer version of it, or another store. If it lacks "
            "only the header: AWS_REQUEST_CHECKSUM_CALCULATION=when_required, with which each upload is read back"
        )
    return StorageError(text)


def shared_connection(
    options: Mapping[str, Any], threads: UploadThreads
) -> SharedConnection[S3Connection]:
    """A reference to the connection for these options."""
    key = json.dumps(["s3", options, id(threads)], sort_keys=True, default=repr)
    return SharedConnection(key, lambda: S3Connection.open(options, threads), S3Connection.close)

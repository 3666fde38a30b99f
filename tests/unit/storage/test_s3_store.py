"""S3's own ways: conditional writes, checksums of the whole object, final errors."""

import asyncio
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.storage import ConflictError, DeniedError, NotFoundError, StorageError, open_store
from pannier.storage.base import limited
from pannier.storage.http_sender import HttpSender
from pannier.storage.retry import TransientError
from pannier.storage.s3.client import S3Connection
from pannier.storage.s3.store import S3Store
from pannier.storage.upload_threads import UploadThreads
from pannier.wire.errors import ConfigurationError
from support.network.certificates import Authority
from support.processes.stretch import BOUND_S
from support.storage.s3_server import S3Server
from support.storage.sources import FileSource, some_bytes

BIG = (17 << 20) + 4321


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def store_in(server: S3Server, place: str, deadline_s: float = 10, **options: object) -> S3Store:
    store = open_store(
        f"s3://{place}", storage_options={**server.options, **options}, deadline_s=deadline_s
    )
    assert isinstance(store, S3Store)
    return store


def test_large_uploads_carry_a_checksum_of_the_whole_object(
    server: S3Server, tmp_path: Path
) -> None:
    async def main() -> None:
        store = store_in(server, "bucket/whole")
        source = FileSource(tmp_path / "spool", some_bytes(BIG))
        await store.upload("file", source, progress=lambda held: None, retried=pytest.fail)
        info = await store.stat("file")
        assert info is not None
        assert info.crc32c == source.crc
        await store.close()

    asyncio.run(main())
    head = server.client.head_object(Bucket="bucket", Key="whole/file", ChecksumMode="ENABLED")
    assert head["ChecksumType"] == "FULL_OBJECT"


def test_parts_go_up_several_at_a_time_in_upload_threads(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, sizes = 9 * (8 << 20) + 77, []
    begun, together = 0, asyncio.Event()
    send = HttpSender.send

    async def counted(self: HttpSender, method: str, url: str, headers: Any, body: Any) -> Any:
        nonlocal begun
        sizes.append(body.size)
        begun += 1
        if begun == 4:
            together.set()
        await together.wait()
        return await send(self, method, url, headers, body)

    monkeypatch.setattr(HttpSender, "send", counted)

    async def main() -> None:
        store = store_in(server, "bucket/parts")
        held: list[int] = []
        source = FileSource(tmp_path / "spool", some_bytes(size))
        info = await store.upload("file", source, progress=held.append, retried=pytest.fail)
        assert (info.size, info.crc32c) == (size, source.crc)
        assert held == sorted(held)
        assert held[-1] == size
        assert await store.read("file") == some_bytes(size)
        await store.close()

    asyncio.run(main())
    assert sorted(sizes) == [77, *[8 << 20] * 9]


def test_a_part_that_is_refused_ends_the_others_and_leaves_no_upload(
    faulty: S3Server, tmp_path: Path
) -> None:
    async def body(store: S3Store) -> None:
        faulty.fault(kind="status", method="PUT", path="partNumber=2", status=403, code="Denied")
        faulty.fault(kind="delay", seconds=BOUND_S, method="PUT", path="partNumber=[134]", times=-1)
        source = FileSource(tmp_path / "spool", some_bytes(5 * (8 << 20)))
        began = time.monotonic()
        with pytest.raises(DeniedError, match="403 Denied"):
            await store.upload("file", source, progress=lambda held: None, retried=pytest.fail)
        assert time.monotonic() - began < BOUND_S / 2
        assert await store.list() == []

    before = faulty.sessions()
    run(faulty, body)
    assert faulty.sessions() == before


@pytest.mark.parametrize(
    "options",
    [
        {"config_kwargs": {"connector_args": {"keepalive_timeout": 5}}},
        {"client_kwargs": {"verify": False}},
    ],
    ids=["connections", "certificates"],
)
def test_a_session_that_the_user_has_set_up_sends_all_itself(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("beside the session")

    monkeypatch.setattr(HttpSender, "send", refuse)

    async def body(store: S3Store) -> None:
        await upload(store, tmp_path, BIG)

    run(server, body, **options)


@pytest.mark.parametrize("given", ["option", "environment", ""])
def test_upload_threads_trust_whom_the_session_trusts(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    bundle = str(Authority(tmp_path).file)
    if given == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
    options = {"client_kwargs": {"verify": bundle}} if given == "option" else {}

    async def main() -> None:
        connection = await S3Connection.open({**server.options, **options}, UploadThreads())
        assert connection._sender is not None
        context = connection._sender._make_tls()
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert (context.cert_store_stats()["x509_ca"] == 1) is bool(given)
        await connection.close()

    asyncio.run(main())


def test_a_proxy_of_the_environment_is_for_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)

        async def body(store: S3Store) -> None:
            with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
                await store.create("decision", b"COMMIT")

        run(server, body, config_kwargs={"connect_timeout": 1})


def test_an_object_without_a_stored_checksum_is_read_back(server: S3Server, tmp_path: Path) -> None:
    data = some_bytes(BIG)
    server.client.put_object(Bucket="bucket", Key="plain/file", Body=data)

    async def main() -> None:
        store = store_in(server, "bucket/plain")
        info = await store.stat("file")
        assert info is not None
        assert info.crc32c is None
        same = FileSource(tmp_path / "same", data)
        found = await store.upload("file", same, progress=lambda held: None, retried=pytest.fail)
        assert found.crc32c == same.crc
        other = FileSource(tmp_path / "other", some_bytes(BIG, seed=1))
        with pytest.raises(ConflictError):
            await store.upload("file", other, progress=lambda held: None, retried=pytest.fail)
        await store.close()

    asyncio.run(main())


def test_a_missing_bucket_and_a_wrong_endpoint_are_errors(server: S3Server) -> None:
    async def main() -> None:
        store = store_in(server, "no-such-bucket/a")
        with pytest.raises(NotFoundError, match=r"NoSuchBucket.*check the bucket's name"):
            await store.probe()
        await store.close()
        # The first try alone takes 2 s on a busy machine.
        lost = store_in(server, "bucket/a", deadline_s=10, endpoint_url="http://127.0.0.1:1")
        with pytest.raises(StorageError, match=r"127\.0\.0\.1:1.*given up"):
            await lost.probe()
        await lost.close()

    asyncio.run(main())


def test_missing_credentials_are_errors(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")

    async def main() -> None:
        store = store_in(server, "bucket/a", key=None, secret=None)
        with pytest.raises(DeniedError, match="AWS_"):
            await store.list()
        await store.close()

    asyncio.run(main())


@pytest.fixture
def faulty(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0.01)
    yield server
    server.clear()


def run(server: S3Server, body: Callable[[S3Store], Awaitable[None]], **options: object) -> None:
    """Runs a coroutine with a new store."""

    async def main() -> None:
        store = store_in(server, f"bucket/{uuid.uuid4().hex}", **options)
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(main())


async def upload(store: S3Store, directory: Path, size: int) -> list[str]:
    """The reasons of its retries."""
    retries: list[str] = []
    source = FileSource(directory / "spool", some_bytes(size))
    info = await store.upload("file", source, progress=lambda held: None, retried=retries.append)
    assert (info.size, info.crc32c) == (size, source.crc)
    return retries


@pytest.mark.parametrize("size", [1000, BIG])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        (409, "ConditionalRequestConflict"),
        (409, "OperationAborted"),
        (400, "IncompleteBody"),
    ],
)
def test_what_s3_asks_to_try_again_is_tried_again(
    faulty: S3Server, tmp_path: Path, size: int, status: int, code: str
) -> None:
    async def body(store: S3Store) -> None:
        fault = {"kind": "status", "status": status, "code": code}
        faulty.fault(**fault, method="PUT")
        first = await store.create("decision", b"COMMIT")
        faulty.fault(**fault, method="PUT")
        await store.replace("decision", b"new", expected=first.generation)
        faulty.fault(**fault, path="file")
        assert len(await upload(store, tmp_path, size)) == 1

    run(faulty, body)
    assert [rule["hits"] for rule in faulty.faults()] == [1, 1, 1]


@pytest.mark.parametrize("by_key", [False, True], ids=["by-prefix", "by-key"])
def test_an_upload_that_s3_loses_or_never_answers_is_made_once_and_leaves_none(
    faulty: S3Server, tmp_path: Path, by_key: bool
) -> None:
    if by_key:
        faulty.list_uploads_by_key()

    async def body(store: S3Store) -> None:
        faulty.fault(kind="lost", method="POST", path=r"\?uploads")
        faulty.fault(
            kind="status", status=404, code="NoSuchUpload", method="PUT", path="partNumber=2"
        )
        retries = await upload(store, tmp_path, BIG)
        assert len(retries) == 2
        assert "NoSuchUpload" in retries[1]
        assert len(await store.list()) == 1

    run(faulty, body)
    assert [rule["hits"] for rule in faulty.faults()] == [1, 1]
    assert faulty.sessions() == []


def test_an_upload_that_is_cancelled_before_its_id_is_known_leaves_none(
    faulty: S3Server, tmp_path: Path
) -> None:
    faulty.list_uploads_by_key()
    faulty.fault(kind="lost", method="POST", path=r"\?uploads", times=-1)

    async def body(store: S3Store) -> None:
        source = FileSource(tmp_path / "spool", some_bytes(BIG))
        lost = asyncio.Event()
        task = asyncio.create_task(
            store.upload(
                "file", source, progress=lambda held: None, retried=lambda reason: lost.set()
            )
        )
        await asyncio.wait_for(lost.wait(), BOUND_S)
        assert faulty.sessions()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(faulty, body)
    assert faulty.sessions() == []


def test_an_answer_without_an_etag_is_no_answer(faulty: S3Server, tmp_path: Path) -> None:
    async def body(store: S3Store) -> None:
        bare = {"status": 200, "code": ""}
        faulty.fault(kind="answered", method="PUT", **bare)
        first = await store.create("decision", b"COMMIT")
        faulty.fault(kind="status", method="HEAD", **bare)
        there = await store.stat("decision")
        assert there is not None
        assert there.generation == first.generation
        faulty.fault(kind="answered", method="PUT", path="partNumber=1", **bare)
        (reason,) = await upload(store, tmp_path, BIG)
        assert "upload_part has no ETag" in reason
        faulty.fault(kind="status", method="HEAD", times=-1, **bare)
        with limited(until=lambda: began + 4):
            began = time.monotonic()
            with pytest.raises(StorageError, match=r"head_object has no .*ETag.*given up"):
                await store.stat("decision")

    run(faulty, body)
    assert faulty.sessions() == []


@pytest.mark.parametrize("foreign", ["", "<html><body>log in</body></html>", "log in"])
def test_an_empty_or_foreign_body_is_no_listing(faulty: S3Server, foreign: str) -> None:
    async def body(store: S3Store) -> None:
        await store.create("a/b", b"1")
        for listing in (store.list, store.list_directories, store.list_unfinished):
            answer = {"kind": "status", "status": 200, "code": "", "body": foreign}
            before = await listing()
            faulty.fault(**answer, method="GET")
            assert await listing() == before
            faulty.fault(**answer, method="GET", times=-1)
            began = time.monotonic()
            with (
                limited(until=lambda: began + 4),  # noqa: B023
                # botocore itself turns what is no XML into a 500.
                pytest.raises(StorageError, match=r"IsTruncated|500"),
            ):
                await listing()
            faulty.clear()

    run(faulty, body)


def test_a_pause_that_s3_asks_for_is_kept(faulty: S3Server) -> None:
    async def main() -> None:
        connection = await S3Connection.open(faulty.options, UploadThreads())
        faulty.fault(kind="status", headers={"Retry-After": "7"})
        with pytest.raises(TransientError) as error:
            await connection.call("head_object", what="x", Bucket="bucket", Key="x")
        assert error.value.after_s == 7
        await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"s3_additional_kwargs": {"ServerSideEncryptoin": "AES256"}},
            r"S3 has no 'ServerSideEncryptoin'; did you mean 'ServerSideEncryption'\?",
        ),
        ({"endpont_url": "http://127.0.0.1:1"}, "endpont_url"),
        ({"endpoint_url": "127.0.0.1:1"}, r"127\.0\.0\.1:1.*check the storage options"),
    ],
    ids=["parameter", "option", "endpoint"],
)
def test_a_misspelt_option_is_refused_by_name(
    server: S3Server, options: dict[str, Any], named: str
) -> None:
    async def body(store: S3Store) -> None:
        with pytest.raises(ConfigurationError, match=named) as error:
            await store.create("a", b"1")
        assert "credentials" not in str(error.value)

    before = server.names("")
    run(server, body, **options)
    assert server.names("") == before


def test_additional_parameters_reach_s3(server: S3Server) -> None:
    async def body(store: S3Store) -> None:
        await store.create("a", b"1")
        (name,) = server.names(store.url.removeprefix("s3://bucket/"))
        head = server.client.head_object(Bucket="bucket", Key=name)
        assert head["ServerSideEncryption"] == "AES256"

    run(server, body, s3_additional_kwargs={"ServerSideEncryption": "AES256"})


@pytest.mark.parametrize("size", [1000, BIG])
def test_a_failed_precondition_where_nothing_stands_is_tried_again(
    faulty: S3Server, tmp_path: Path, size: int
) -> None:
    async def body(store: S3Store) -> None:
        fault = {"kind": "status", "status": 412, "code": "PreconditionFailed"}
        faulty.fault(**fault, method="PUT", times=2)
        first = await store.create("decision", b"COMMIT")
        faulty.fault(**fault, method="PUT")
        await store.replace("decision", b"new", expected=first.generation)
        # A multipart upload asks at its end.
        where = {"method": "PUT"} if size == 1000 else {"method": "POST", "path": "uploadId="}
        faulty.fault(**fault, **where, times=2)
        assert len(await upload(store, tmp_path, size)) == 2

    run(faulty, body)
    assert [rule["hits"] for rule in faulty.faults()] == [2, 1, 2]


def test_a_precondition_that_never_holds_where_nothing_stands_is_no_conflict(
    faulty: S3Server, tmp_path: Path
) -> None:
    async def body(store: S3Store) -> None:
        faulty.fault(kind="status", status=412, code="PreconditionFailed", method="PUT", times=-1)
        for operation in (store.create("a", b"1"), upload(store, tmp_path, 1000)):
            with pytest.raises(
                StorageError, match=r"412.*(nothing|not exist).*given up after 6"
            ) as error:
                await operation
            assert not isinstance(error.value, ConflictError)

    run(faulty, body)


@pytest.mark.parametrize("kind", ["status", "answered"])
def test_an_upload_that_ends_with_an_error_in_a_200_is_settled(
    faulty: S3Server, tmp_path: Path, kind: str
) -> None:
    """CompleteMultipartUpload answers before it knows; the parts were joined, or not."""

    async def body(store: S3Store) -> None:
        faulty.fault(kind=kind, status=200, code="InternalError", method="POST", path="uploadId=")
        assert len(await upload(store, tmp_path, BIG)) == 1

    run(faulty, body)
    assert faulty.faults()[0]["hits"] == 1
    assert faulty.sessions() == []


def test_a_token_that_expires_before_its_time_is_looked_for_again_once(
    faulty: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another process keeps the credentials file fresh."""
    credentials = tmp_path / "credentials"

    def write(token: str) -> None:
        credentials.write_text(
            "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"
            f"aws_session_token = {token}\n"
        )

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    write("old")

    async def body(store: S3Store) -> None:
        await store.create("a", b"1")
        faulty.fault(
            kind="status", status=400, code="ExpiredToken", security_token="^old$", times=-1
        )
        with pytest.raises(DeniedError, match=r"ExpiredToken.*check which credentials"):
            await store.create("b", b"1")
        write("new")
        await asyncio.gather(upload(store, tmp_path, BIG), store.create("c", b"1"), store.read("a"))
        assert faulty.faults()[0]["hits"] <= 2 + 3

    run(faulty, body, key=None, secret=None)


def test_an_expired_token_is_noticed_by_an_answer_without_a_body(faulty: S3Server) -> None:
    """As S3 answers HEAD."""

    async def body(store: S3Store) -> None:
        await store.create("a", b"1")
        faulty.fault(kind="status", status=400, code="ExpiredToken", method="HEAD")
        assert await store.stat("a") is not None
        faulty.fault(kind="status", status=400, code="ExpiredToken", method="HEAD", times=-1)
        with pytest.raises(DeniedError, match="check which credentials"):
            await store.stat("a")

    run(faulty, body)


def test_credentials_that_are_not_there_yet_are_looked_for_again(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the machine's metadata server did not answer in time."""
    credentials = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))

    async def body(store: S3Store) -> None:
        with pytest.raises(DeniedError, match="AWS_"):
            await store.create("a", b"1")
        credentials.write_text(
            "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"
        )
        await store.create("a", b"1")

    run(server, body, key=None, secret=None)


def test_a_store_without_conditional_writes_is_named_with_what_it_lacks(faulty: S3Server) -> None:
    async def body(store: S3Store) -> None:
        faulty.fault(kind="status", status=501, code="NotImplemented", method="PUT")
        with pytest.raises(StorageError, match=r"501 NotImplemented.*conditional writes.*crc32c"):
            await store.create("a", b"1")

    run(faulty, body)


@pytest.mark.parametrize("chosen_by", ["environment", "options"])
def test_a_store_that_refuses_checksum_headers_is_used_without_them(
    faulty: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen_by: str
) -> None:
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION", raising=False)
    faulty.refuse_checksums()

    async def refused() -> None:
        store = store_in(faulty, f"bucket/{chosen_by}")
        with pytest.raises(StorageError, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            await store.create("record", b"1")
        await store.close()

    async def kept(**options: object) -> None:
        store = store_in(faulty, f"bucket/{chosen_by}", **options)
        await store.create("record", b"1")
        assert await store.read("record") == b"1"
        for size in (1 << 10, BIG):
            source = FileSource(tmp_path / f"spool-{size}", some_bytes(size))
            await store.upload(
                f"file-{size}", source, progress=lambda held: None, retried=pytest.fail
            )
            assert await store.read(f"file-{size}") == some_bytes(size)
        # What arrives is compared all the same, by reading it.
        faulty.fault(kind="corrupt", method="PUT", path="file-damaged")
        source = FileSource(tmp_path / "spool", some_bytes(1 << 10))
        reasons: list[str] = []
        await store.upload(
            "file-damaged", source, progress=lambda held: None, retried=reasons.append
        )
        assert len(reasons) == 1
        assert "arrived with 1024 bytes and crc32c" in reasons[0]
        assert await store.read("file-damaged") == some_bytes(1 << 10)
        await store.close()

    asyncio.run(refused())
    if chosen_by == "environment":
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        asyncio.run(kept())
    else:
        asyncio.run(kept(config_kwargs={"request_checksum_calculation": "when_required"}))


def test_a_pods_credentials_that_are_not_there_yet_are_waited_for(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the agent of EKS Pod Identity starts later than the pod."""
    credentials = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    reasons: list[str] = []

    def retried(reason: str) -> None:
        reasons.append(reason)
        # Not yet when the first try looks again.
        if len(reasons) == 2:
            credentials.write_text(
                "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"
            )

    async def body(store: S3Store) -> None:
        with limited(retried=retried):
            await store.create("a", b"1")

    run(server, body, key=None, secret=None)
    assert len(reasons) >= 2


def test_a_provider_of_credentials_that_fails_is_asked_again(
    faulty: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the agent of EKS Pod Identity, when it is restarted."""
    answer = '{"Version": 1, "AccessKeyId": "test", "SecretAccessKey": "test"}'
    process = tmp_path / "process"
    # Fails at its first start.
    process.write_text(
        f"#!/bin/sh\nif [ ! -e {tmp_path}/asked ]; then touch {tmp_path}/asked; exit 1; fi\n"
        f"echo '{answer}'\n"
    )
    process.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {process}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    async def body(store: S3Store) -> None:
        await store.create("a", b"1")
        assert (tmp_path / "asked").exists()

    run(faulty, body, key=None, secret=None)


def test_a_denial_after_a_lost_answer_does_not_mean_that_nothing_was_written(
    faulty: S3Server,
) -> None:
    async def body(store: S3Store) -> None:
        faulty.fault(kind="answered", status=503, method="PUT")
        faulty.fault(kind="status", status=403, code="AccessDenied", method="PUT")
        with pytest.raises(StorageError, match="may have written") as error:
            await store.create("a", b"1")
        assert not isinstance(error.value, DeniedError)
        assert await store.read("a") == b"1"

    run(faulty, body)


def test_a_server_that_ignores_preconditions_of_deletes_is_refused(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = S3Connection.call

    async def unconditional(self: S3Connection, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "delete_object":
            arguments.pop("IfMatch", None)
        return await call(self, operation, **arguments)

    monkeypatch.setattr(S3Connection, "call", unconditional)

    async def body(store: S3Store) -> None:
        with pytest.raises(StorageError, match=r"ignores preconditions.*a removal"):
            await store.probe()
        assert await store.list() == []

    run(server, body)


def test_a_call_that_takes_too_long_says_for_how_long_it_had_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(self: S3Connection, operation: str, arguments: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(S3Connection, "_once", hang)
    monkeypatch.setattr(timeouts, "STORAGE_CONNECT_S", 0.01)
    monkeypatch.setattr(timeouts, "STORAGE_IDLE_S", 0.01)
    fs: Any = SimpleNamespace(_s3creator=None)

    async def main() -> None:
        with pytest.raises(TransientError, match=r"^s3://bucket/x: no answer within 0 s$"):
            await S3Connection(fs, None).call("get_object", what="s3://bucket/x")

    asyncio.run(main())

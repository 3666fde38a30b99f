"""Google Cloud Storage when things go wrong, by real gcsfs over HTTP."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import google.auth.credentials
import google.auth.exceptions
import pytest

from pannier.attempts.commit import prepare_commit
from pannier.daemon import doctor_checks
from pannier.storage import (
    ConflictError,
    DeniedError,
    HeldError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    StorageError,
    open_store,
)
from pannier.storage.base import UnreachableError, limited
from pannier.storage.gcs.resumable_upload import UNIT
from pannier.storage.gcs.store import GcsStore
from pannier.storage.http_sender import HttpSender
from pannier.v1 import diagnosis_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import ConfigurationError
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer
from support.storage.sources import FileSource, some_bytes

BIG = (17 << 20) + 4321
LAST = BIG // UNIT * UNIT
"""Where its last chunk begins."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def server(shared: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.url)
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0.01)
    # So that a file has several.
    monkeypatch.setattr("pannier.storage.gcs.http._CHUNK", 8 << 20)
    yield shared
    shared.clear()
    shared.options(
        ignore_preconditions=False, ignore_delete_preconditions=False, ignore_checksums=False
    )


Body = Callable[[GcsStore], Coroutine[Any, Any, None]]


@pytest.fixture
def run(server: GcsServer, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a coroutine with a new store in the bucket."""

    def runner(body: Body, *, deadline_s: float = 20, bucket: str = "bucket") -> None:
        async def main() -> None:
            url = f"gs://{bucket}/{request.node.name}".replace("[", "-").replace("]", "")
            store = open_store(url, deadline_s=deadline_s)
            assert isinstance(store, GcsStore)
            try:
                await body(store)
            finally:
                await store.close()

        asyncio.run(main())

    return runner


class Upload:
    """An upload of ``size`` bytes, and its reports."""

    def __init__(self, directory: Path, size: int = BIG) -> None:
        self.data = some_bytes(size)
        self.source = FileSource(directory / "spool", self.data)
        self.progress: list[int] = []
        self.retries: list[str] = []

    async def to(self, store: GcsStore, key: str = "file") -> ObjectInfo:
        info = await store.upload(
            key, self.source, progress=self.progress.append, retried=self.retries.append
        )
        assert (info.size, info.crc32c) == (self.source.size, self.source.crc)
        assert await store.read(key) == self.data
        return info


def chunks(server: GcsServer) -> list[str]:
    """Ranges of the latest upload's chunks, in the order of their arrival."""
    sent = [range_ for method, _, range_ in server.requests() if method == "PUT" and range_]
    starts = [i for i, range_ in enumerate(sent) if range_.startswith("bytes 0-")]
    return sent[starts[-1] :]


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "method": "PUT", "status": 503, "times": 3},
        {"kind": "status", "method": "PUT", "status": 429, "headers": {"Retry-After": "0"}},
        {"kind": "status", "method": "PUT", "status": 408},
        {"kind": "status", "method": "POST", "status": 500, "times": 2},
        {"kind": "reset", "method": "PUT", "content_range": "bytes 8388608-"},
        {"kind": "reset", "method": "POST"},
        {"kind": "partial", "method": "PUT", "bytes": 3_000_000},
        {"kind": "partial", "method": "PUT", "skip": 2, "bytes": 300_000},
        {"kind": "lost", "method": "PUT"},
        {"kind": "lost", "method": "PUT", "skip": 2},
        {"kind": "lost", "method": "POST"},
    ],
    ids=lambda fault: "-".join(str(value) for value in fault.values()).replace("/", ""),
)
def test_an_upload_survives(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, fault: dict[str, Any]
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(**fault)
        upload = Upload(tmp_path)
        await upload.to(store)
        assert len(upload.retries) == fault.get("times", 1)
        assert upload.progress == sorted(upload.progress)

    run(body)
    assert server.faults()[0]["hits"] == fault.get("times", 1)


def test_a_cut_upload_goes_on_where_the_server_is(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="partial", method="PUT", skip=1, bytes=3_000_000)
        await Upload(tmp_path).to(store)

    run(body)
    held = (8 << 20) + 3_000_000 // (256 << 10) * (256 << 10)
    assert chunks(server) == [
        f"bytes 0-{(8 << 20) - 1}/{BIG}",
        f"bytes {8 << 20}-{(16 << 20) - 1}/{BIG}",
        f"bytes */{BIG}",
        f"bytes {held}-{(16 << 20) - 1}/{BIG}",
        f"bytes {16 << 20}-{LAST - 1}/{BIG}",
        f"bytes {LAST}-{BIG - 1}/{BIG}",
    ]


@pytest.mark.parametrize("size", [1000, BIG])
def test_a_session_that_the_user_has_set_up_sends_all_itself(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("beside the session, which may have a proxy")

    monkeypatch.setattr(HttpSender, "send", refuse)

    async def main() -> None:
        options = {"session_kwargs": {"trust_env": True}}
        store = open_store(f"gs://bucket/session-{size}", storage_options=options)
        assert isinstance(store, GcsStore)
        await Upload(tmp_path, size).to(store)
        await store.close()

    asyncio.run(main())


def test_a_lost_session_is_begun_again(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="status", method="PUT", status=410, skip=1, message="session expired")
        upload = Upload(tmp_path)
        await upload.to(store)
        assert len(upload.retries) == 1
        assert "session expired" in upload.retries[0]

    run(body)


@pytest.mark.parametrize("size", [1000, BIG])
@pytest.mark.parametrize("checked_by", ["server", "client"])
def test_corruption_on_the_way_is_found_and_sent_again(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, checked_by: str, size: int
) -> None:
    async def body(store: GcsStore) -> None:
        server.options(ignore_checksums=checked_by == "client")
        where = {"path": "uploadType=multipart"} if size == 1000 else {"method": "PUT"}
        server.fault(kind="corrupt", **where)
        upload = Upload(tmp_path, size)
        await upload.to(store)
        assert len(upload.retries) == 1
        assert "crc32c" in upload.retries[0].lower()

    run(body)


def test_corruption_twice_fails_with_both_checksums_and_leaves_nothing(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.options(ignore_checksums=True)
        server.fault(kind="corrupt", method="PUT", content_range="bytes 0-", times=-1)
        upload = Upload(tmp_path)
        with pytest.raises(IntegrityError, match=f"{upload.source.crc:08x}"):
            await upload.to(store)
        assert await store.list() == []

    before = server.sessions()
    run(body)
    assert server.sessions() == before


def test_a_refusal_in_the_middle_of_a_chunk_is_seen(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="status", method="PUT", status=403, skip=1, message="no more")
        upload = Upload(tmp_path)
        with pytest.raises(DeniedError, match="no more"):
            await upload.to(store)
        assert upload.retries == []

    run(body)


def test_a_spool_file_that_was_cut_is_never_sent(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        upload = Upload(tmp_path)
        os.truncate(upload.source.path, 9 << 20)
        with pytest.raises(IntegrityError, match=f"ends at byte {9 << 20} of {BIG}"):
            await upload.to(store)
        assert await store.list() == []

    before = server.sessions()
    run(body)
    assert server.sessions() == before


def test_corruption_of_what_is_read_is_found(server: GcsServer, run: Callable[..., None]) -> None:
    async def body(store: GcsStore) -> None:
        await store.create("a", b"content")
        server.fault(kind="corrupt", method="GET")
        assert await store.read("a") == b"content"

    run(body)
    assert server.faults()[0]["hits"] == 1


def test_a_lost_answer_to_a_create_is_a_success(
    server: GcsServer, run: Callable[..., None]
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="lost", method="POST")
        await store.create("decision", b"COMMIT by us")
        with pytest.raises(ConflictError):
            await store.create("decision", b"ABORT by others")
        seen = await store.stat("decision")
        assert seen is not None
        server.fault(kind="lost", method="POST")
        await store.replace("decision", b"new", expected=seen.generation)
        assert await store.read("decision") == b"new"

    run(body)


def test_a_try_that_failed_before_others_won_is_a_conflict(
    server: GcsServer, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0.5)

    async def body(store: GcsStore) -> None:
        seen = await store.create("m", b"0")
        server.fault(kind="status", method="POST", status=503, headers={"Retry-After": "5"})
        ours = asyncio.create_task(store.replace("m", b"ours", expected=seen.generation))
        while not server.faults()[0]["hits"]:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0)
        theirs = await store.replace("m", b"theirs", expected=seen.generation)
        with pytest.raises(ConflictError) as error:
            await ours
        assert error.value.current is not None
        assert error.value.current.generation == theirs.generation
        assert await store.read("m") == b"theirs"

    run(body)


@pytest.mark.parametrize("answer", ["{}", "", "[]", '{"name": "cut'])
def test_a_success_without_the_objects_resource_is_settled_by_reading_back(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, answer: str
) -> None:
    async def body(store: GcsStore) -> None:
        fault = {"kind": "answered", "status": 200, "body": answer}
        server.fault(**fault, path="uploadType=multipart", times=3)
        first = await store.create("decision", b"COMMIT")
        replaced = await store.replace("decision", b"again", expected=first.generation)
        assert await store.stat("decision") == replaced
        await Upload(tmp_path, 1000).to(store, "small")
        server.fault(**fault, method="PUT", content_range=f"-{BIG - 1}/")
        await Upload(tmp_path).to(store, "large")
        server.fault(**fault, method="GET")
        assert await store.stat("decision") == replaced

    run(body)
    assert [rule["hits"] for rule in server.faults()] == [3, 1, 1]


@pytest.mark.parametrize("size", [1000, BIG])
def test_a_success_after_which_nothing_is_there_is_tried_again(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, size: int
) -> None:
    async def body(store: GcsStore) -> None:
        where = (
            {"path": "uploadType=multipart"}
            if size == 1000
            else {"method": "PUT", "content_range": f"-{BIG - 1}/"}
        )
        server.fault(kind="status", status=200, **where)
        upload = Upload(tmp_path, size)
        await upload.to(store)
        assert ["the object does not exist" in retry for retry in upload.retries] == [True]

    run(body)


@pytest.mark.parametrize("size", [1000, BIG])
def test_a_failed_precondition_where_nothing_stands_is_tried_again(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, size: int
) -> None:
    async def body(store: GcsStore) -> None:
        fault = {"kind": "status", "status": 412, "reason": "conditionNotMet", "method": "POST"}
        server.fault(**fault, times=2)
        first = await store.create("decision", b"COMMIT")
        server.fault(**fault)
        await store.replace("decision", b"new", expected=first.generation)
        server.fault(**fault, times=2)
        upload = Upload(tmp_path, size)
        await upload.to(store)
        assert len(upload.retries) == 2

    run(body)
    assert [rule["hits"] for rule in server.faults()] == [2, 1, 2]


def test_a_precondition_that_never_holds_where_nothing_stands_is_no_conflict(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="status", status=412, method="POST", times=-1)
        for operation in (store.create("a", b"1"), Upload(tmp_path, 1000).to(store)):
            with pytest.raises(
                StorageError, match=r"412.*(nothing|not exist).*given up after 6"
            ) as error:
                await operation
            assert not isinstance(error.value, ConflictError)
        server.clear()
        assert await store.list() == []

    run(body)


@pytest.mark.parametrize("status", [403, 429])
@pytest.mark.parametrize("reason", ["rateLimitExceeded", "userRateLimitExceeded"])
def test_a_rate_limit_is_waited_out(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, status: int, reason: str
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="status", status=status, reason=reason, times=2)
        await store.probe()
        server.fault(kind="status", status=status, reason=reason, method="PUT")
        upload = Upload(tmp_path)
        await upload.to(store)
        assert len(upload.retries) == 1

    run(body)
    assert [rule["hits"] for rule in server.faults()] == [2, 1]


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_has_all_bytes_is_asked_until_it_has_made_the_object(
    server: GcsServer, run: Callable[..., None], tmp_path: Path, times: int
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="unfinished", method="PUT", content_range=f"/{BIG}", skip=3, times=times)
        upload = Upload(tmp_path)
        await upload.to(store)
        assert len(upload.retries) == times

    run(body)
    assert chunks(server)[4:] == [f"bytes */{BIG}"] * times


def test_a_server_that_never_makes_the_object_of_all_bytes_is_given_up_by_name(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="unfinished", method="PUT", skip=3, times=-1)
        with pytest.raises(StorageError, match=rf"holds {BIG} of {BIG} bytes, but the object"):
            await Upload(tmp_path).to(store)

    before = server.sessions()
    run(body, deadline_s=2.5)
    assert server.sessions() == before


class Tokens(google.auth.credentials.Credentials):
    """``token-1``, and another with each refresh."""

    def __init__(self, *, refusal: str = "", outages: int = 0, expired: bool = False) -> None:
        super().__init__()
        self.refusal = refusal
        self.outages = outages
        """Refreshes that fail because the metadata server is down."""
        self.refreshed = 0
        self.token = None if expired else "token-1"

    def refresh(self, request: object) -> None:
        self.refreshed += 1
        if self.refreshed <= self.outages:
            # As google.auth.compute_engine does.
            cause = google.auth.exceptions.TransportError("metadata server unavailable")
            raise google.auth.exceptions.RefreshError(cause) from cause
        if self.refusal:
            raise google.auth.exceptions.RefreshError(self.refusal)
        self.token = f"token-{self.refreshed + 1}"


def with_tokens(tokens: Tokens, body: Body) -> None:
    async def main() -> None:
        store = open_store(f"gs://bucket/{uuid.uuid4().hex}", storage_options={"token": tokens})
        assert isinstance(store, GcsStore)
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(main())


def test_a_token_that_ends_before_its_time_is_fetched_again_once_for_all(
    server: GcsServer, tmp_path: Path
) -> None:
    tokens = Tokens()

    async def body(store: GcsStore) -> None:
        await store.create("a", b"1")
        server.fault(kind="status", status=401, authorization="token-1$", times=-1)
        calls = [Upload(tmp_path / str(i)).to(store, f"file-{i}") for i in range(3)]
        await asyncio.gather(*calls)
        assert tokens.refreshed == 1

    for number in range(3):
        (tmp_path / str(number)).mkdir()
    with_tokens(tokens, body)


@pytest.mark.parametrize("expired", [True, False], ids=["expired", "refused"])
def test_a_metadata_server_that_is_down_is_waited_for(server: GcsServer, expired: bool) -> None:
    tokens = Tokens(outages=2, expired=expired)

    async def body(store: GcsStore) -> None:
        if not expired:
            server.fault(kind="status", status=401, authorization="token-1$", times=-1)
        await store.create("a", b"1")
        assert tokens.refreshed == 3

    with_tokens(tokens, body)


def test_a_metadata_server_that_stays_down_is_named(server: GcsServer) -> None:
    async def body(store: GcsStore) -> None:
        end = time.monotonic() + 4.0
        with (
            limited(until=lambda: end),
            pytest.raises(UnreachableError, match=r"no token.*metadata server unavailable"),
        ):
            await store.create("a", b"1")

    with_tokens(Tokens(outages=1000, expired=True), body)


def test_an_account_without_a_token_is_refused_at_once(server: GcsServer) -> None:
    tokens = Tokens(refusal="the account is disabled", expired=True)

    async def body(store: GcsStore) -> None:
        with pytest.raises(DeniedError, match=r"the account is disabled.*check which credentials"):
            await store.create("a", b"1")
        assert tokens.refreshed == 1

    with_tokens(tokens, body)


@pytest.mark.parametrize("refusal", ["", "the account is disabled"])
def test_a_second_401_is_final(server: GcsServer, refusal: str) -> None:
    tokens = Tokens(refusal=refusal)

    async def body(store: GcsStore) -> None:
        server.fault(kind="status", status=401, message="who are you", times=-1)
        with pytest.raises(DeniedError, match=rf"401 who are you.*{refusal}") as error:
            await store.stat("a")
        assert "given up" not in str(error.value)
        assert tokens.refreshed == 1

    with_tokens(tokens, body)
    assert server.faults()[0]["hits"] == (1 if refusal else 2)


@pytest.mark.parametrize("refused", ["POST", "GET"], ids=["retry", "read back"])
def test_a_denial_after_a_lost_answer_does_not_mean_that_nothing_was_written(
    server: GcsServer, run: Callable[..., None], refused: str
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="lost", method="POST")
        server.fault(kind="status", status=403, method=refused)
        with pytest.raises(StorageError, match="may have written") as error:
            await store.create("a", b"1")
        assert not isinstance(error.value, DeniedError)
        assert await store.read("a") == b"1"

    run(body)


@pytest.mark.parametrize("hold", ["temporaryHold", "eventBasedHold"])
def test_a_hold_is_named_at_once(
    server: GcsServer, run: Callable[..., None], request: pytest.FixtureRequest, hold: str
) -> None:
    async def body(store: GcsStore) -> None:
        seen = await store.create(".metadata", b"1")
        name = store.url.removeprefix("gs://bucket/") + "/.metadata"
        url = f"{server.url}/storage/v1/b/bucket/o/{quote(name, safe='')}"
        await asyncio.to_thread(patch, url, {hold: True})
        before = len(server.requests())
        for operation in (
            store.replace(".metadata", b"2", expected=seen.generation),
            store.delete(".metadata", generation=seen.generation),
        ):
            with pytest.raises(HeldError, match=r"under active .* hold.*release the hold") as error:
                await operation
            assert "credentials" not in str(error.value)
        assert len(server.requests()) == before + 2
        await asyncio.to_thread(patch, url, {hold: False})
        await store.replace(".metadata", b"2", expected=seen.generation)

    run(body)


def test_a_commit_over_metadata_under_a_hold_is_refused_before_it_is_decided(
    server: GcsServer, run: Callable[..., None]
) -> None:
    attempt = object_names.Attempt(1, 1, "g00000000", "a")

    async def body(store: GcsStore) -> None:
        await store.create(object_names.METADATA, b"another one's")
        name = store.url.removeprefix("gs://bucket/") + "/.metadata"
        url = f"{server.url}/storage/v1/b/bucket/o/{quote(name, safe='')}"

        async def prepare() -> object:
            return await prepare_commit(
                store,
                overwrite=save_pb2.OVERWRITE_ANY,
                save=save_pb2.SaveId(job="j", incarnation="a", group=attempt.group, number=1),
                attempt=attempt,
                plan_id="p",
                metadata=b"new",
                host="here",
            )

        await asyncio.to_thread(patch, url, {"temporaryHold": True})
        with pytest.raises(HeldError, match=r"\.metadata is under a hold .temporaryHold.*release"):
            await prepare()
        assert await store.stat(object_names.decision(attempt.name)) is None
        await asyncio.to_thread(patch, url, {"temporaryHold": False})
        await prepare()

    run(body)


def patch(url: str, changes: dict[str, bool]) -> None:
    call = urllib.request.Request(url, json.dumps(changes).encode(), method="PATCH")
    urllib.request.urlopen(call, timeout=BOUND_S).close()


def test_a_retention_policy_is_named_as_one(server: GcsServer, run: Callable[..., None]) -> None:
    async def body(store: GcsStore) -> None:
        message = "Object is subject to bucket's retention policy"
        server.fault(kind="status", status=403, reason="retentionPolicyNotMet", message=message)
        with pytest.raises(HeldError, match="wait for its retention period"):
            await store.delete("a")

    run(body)


def test_denied_is_final_and_says_what_to_check(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        for status in (401, 403):
            server.clear()
            server.fault(kind="status", status=status, times=-1, message="robot has no access")
            began = time.monotonic()
            for operation in (store.probe(), Upload(tmp_path).to(store), store.list()):
                with pytest.raises(DeniedError, match=r"robot has no access.*objectUser"):
                    await operation
            assert time.monotonic() - began < BOUND_S

    run(body)


def test_a_missing_bucket_is_final(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        upload = Upload(tmp_path)
        calls = (store.probe(), upload.to(store), store.list(), store.stat("a"), store.read("a"))
        for operation in calls:
            with pytest.raises(NotFoundError, match="bucket does not exist"):
                await operation
        assert upload.retries == []

    run(body, bucket="no-such-bucket")


def test_trouble_ends_at_the_deadline_with_its_reason(
    server: GcsServer, run: Callable[..., None], tmp_path: Path
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="status", method="PUT", status=503, times=-1, message="backend is busy")
        upload, began = Upload(tmp_path), time.monotonic()
        with pytest.raises(StorageError, match=r"backend is busy.*given up after \d+ tries"):
            await upload.to(store)
        assert time.monotonic() - began > 0.2
        assert len(upload.retries) > 1

    before = server.sessions()
    run(body, deadline_s=2.5)
    assert server.sessions() == before


def test_an_unresponsive_server_is_given_up(
    server: GcsServer,
    run: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pannier.common.timeouts.STORAGE_IDLE_S", 0.2)

    async def body(store: GcsStore) -> None:
        server.fault(kind="delay", method="POST", seconds=60)
        await store.create("a", b"1")

    began = time.monotonic()
    run(body)
    assert time.monotonic() - began < 50
    assert server.faults()[0]["hits"] == 1


def test_a_store_that_ignores_preconditions_is_refused(
    server: GcsServer, run: Callable[..., None]
) -> None:
    async def body(store: GcsStore) -> None:
        server.options(ignore_preconditions=True)
        with pytest.raises(StorageError, match="ignores preconditions"):
            await store.probe()
        assert await store.list() == []

    run(body)


def test_a_store_that_ignores_preconditions_of_deletes_is_refused(
    server: GcsServer, run: Callable[..., None]
) -> None:
    async def body(store: GcsStore) -> None:
        server.options(ignore_delete_preconditions=True)
        with pytest.raises(StorageError, match=r"ignores preconditions.*a removal"):
            await store.probe()
        assert await store.list() == []

    run(body)


def test_a_probe_lists_too(server: GcsServer, run: Callable[..., None]) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(
            kind="status", method="GET", path=r"/o\?prefix=", status=403, message="may not list"
        )
        with pytest.raises(DeniedError, match="may not list"):
            await store.probe()
        assert await store.list() == []

    run(body)


def test_a_zonal_bucket_is_refused_by_name(server: GcsServer, run: Callable[..., None]) -> None:
    bucket = f"rapid-{uuid.uuid4().hex}"
    order = json.dumps({"name": bucket, "storageClass": "RAPID"}).encode()
    urllib.request.urlopen(f"{server.url}/storage/v1/b", order, timeout=BOUND_S).close()

    async def body(store: GcsStore) -> None:
        with pytest.raises(StorageError, match=r"zonal \(Rapid\) bucket.*use a regional"):
            await store.probe()

    run(body, bucket=bucket)


def test_doctor_says_what_a_probe_finds(server: GcsServer) -> None:
    bucket = f"rapid-{uuid.uuid4().hex}"
    order = json.dumps({"name": bucket, "storageClass": "RAPID"}).encode()
    urllib.request.urlopen(f"{server.url}/storage/v1/b", order, timeout=BOUND_S).close()
    failed = diagnosis_pb2.CHECK_RESULT_FAILED

    rapid = asyncio.run(doctor_checks.check_target(f"gs://{bucket}/run", (), {}, 20))
    assert (rapid.result, "zonal (Rapid) bucket" in rapid.found) == (failed, True)
    server.fault(kind="status", method="GET", path=r"/o\?prefix=", status=403, message="no list")
    denied = asyncio.run(doctor_checks.check_target("gs://bucket/run", (), {}, 20))
    assert (denied.result, "no list" in denied.found) == (failed, True)
    assert "create, read, list and delete" in denied.hint
    good = asyncio.run(doctor_checks.check_target("gs://bucket/run", (), {}, 20))
    assert (good.result, "listed" in good.found) == (diagnosis_pb2.CHECK_RESULT_OK, True)


@pytest.mark.parametrize("status", [403, 404, 501])
def test_a_probe_needs_no_answer_about_the_buckets_layout(
    server: GcsServer, run: Callable[..., None], status: int
) -> None:
    async def body(store: GcsStore) -> None:
        server.fault(kind="status", path="storageLayout", status=status)
        await store.probe()

    run(body)
    assert server.faults()[0]["hits"] == 1


def test_stores_of_one_loop_share_a_connection_and_close_independently(
    server: GcsServer, run: Callable[..., None]
) -> None:
    async def body(store: GcsStore) -> None:
        other = open_store(store.url, deadline_s=20)
        await asyncio.gather(store.create("a", b"1"), other.create("b", b"2"))
        await other.close()
        await other.close()
        assert await store.read("b") == b"2"
        with pytest.raises(StorageError, match="closed"):
            await other.read("b")

    run(body)


def test_listing_follows_pages(server: GcsServer, run: Callable[..., None]) -> None:
    async def body(store: GcsStore) -> None:
        keys = [f"r/{i:04}" for i in range(1003)]
        for at in range(0, len(keys), 100):
            await asyncio.gather(*(store.create(key, b"") for key in keys[at : at + 100]))
        assert [info.key for info in await store.list("r/")] == keys

    run(body)


@pytest.mark.parametrize("foreign", ["", "{}", "<html>log in</html>", '{"error": "busy"}'])
def test_an_empty_or_foreign_body_is_no_listing(
    server: GcsServer, run: Callable[..., None], foreign: str
) -> None:
    async def body(store: GcsStore) -> None:
        await store.create("a/b", b"1")
        fault = {"kind": "answered", "status": 200, "body": foreign, "path": r"/o\?prefix"}
        server.fault(**fault)
        assert [info.key for info in await store.list()] == ["a/b"]
        server.fault(**fault, times=-1)
        for listing in (store.list, store.list_directories):
            began = time.monotonic()
            with (
                limited(until=lambda: began + 4),  # noqa: B023
                pytest.raises(StorageError, match=r"no listing|isn't JSON"),
            ):
                await listing()

    run(body)


def test_a_misspelt_option_is_refused_by_name(server: GcsServer) -> None:
    async def main() -> None:
        store = open_store("gs://bucket/misspelt", storage_options={"tokne": "anon"})
        with pytest.raises(ConfigurationError, match=r"'tokne'; did you mean 'token'\?"):
            await store.create("a", b"1")
        await store.close()

    asyncio.run(main())


def test_storage_needs_no_torch_and_no_layout_lookup() -> None:
    script = """
import sys
from pannier.storage import open_store
open_store("gs://bucket/a"); open_store("s3://bucket/a")
unwanted = {"torch", "numpy", "gcsfs.extended_gcsfs"} & set(sys.modules)
assert not unwanted, unwanted
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=2 * BOUND_S)

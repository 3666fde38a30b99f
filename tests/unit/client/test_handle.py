"""The handle: both of torch's types in one, never cancelled, never leaked."""

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from pannier.client.handle import Resolver, SaveHandle, SaveResult, UnretrievedErrors
from pannier.v1 import save_pb2
from pannier.wire.errors import SaveAbortedError
from support.processes.stretch import BOUND_S

RESULT = SaveResult("/x/y", "i1-a1-g00000000-s1", 10, 20, {"plan": 0.1})


def make() -> tuple[SaveHandle, Resolver]:
    handle = SaveHandle("job/i/g/1", "/x/y")
    return handle, Resolver(handle)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_it_is_both_a_future_and_torchs_response() -> None:
    handle, _ = make()
    assert isinstance(handle, concurrent.futures.Future)
    assert isinstance(handle, AsyncSaveResponse)


def test_it_is_hashable_and_equal_to_itself_only() -> None:
    one, other = make()[0], make()[0]
    assert len({one, other, one}) == 2
    assert one != other


def test_its_repr_has_id_state_and_percent() -> None:
    handle, resolver = make()
    assert repr(handle) == "<SaveHandle job/i/g/1 to /x/y: PLANNING, 0%>"
    for uploaded, percent in ((450, 45), (1000, 99)):
        resolver.show(state="UPLOADING", bytes=1000, bytes_uploaded=uploaded)
        assert repr(handle) == f"<SaveHandle job/i/g/1 to /x/y: UPLOADING, {percent}%>"
        assert str(handle.status()) == f"save job/i/g/1 to /x/y: UPLOADING {percent}%"
    resolver.show(state="COMMITTED")
    assert repr(handle) == "<SaveHandle job/i/g/1 to /x/y: COMMITTED, 100%>"


def test_it_cannot_be_cancelled() -> None:
    handle, resolver = make()
    assert not handle.cancel()
    assert not handle.upload_completion.cancel()
    assert not handle.staging_completion.cancel()
    resolver.resolve(RESULT)
    assert handle.result(0) is RESULT


def test_concurrent_futures_and_asyncio_take_it() -> None:
    handle, resolver = make()
    threading.Timer(0.05, lambda: resolver.resolve(RESULT)).start()
    done, pending = concurrent.futures.wait([handle], timeout=BOUND_S)
    assert (done, pending) == ({handle}, set())
    assert list(concurrent.futures.as_completed([handle])) == [handle]

    async def ask() -> SaveResult:
        return await asyncio.wrap_future(handle)

    assert asyncio.run(ask()) is RESULT


def test_staging_is_complete_before_the_upload() -> None:
    handle, resolver = make()
    resolver.staged()
    assert handle.staging_completion.result(0) is None
    assert not handle.upload_completion.done()
    resolver.resolve(RESULT)
    assert handle.upload_completion.result(0) is None


def test_a_rank_is_ingested_before_its_save_is_committed() -> None:
    handle, resolver = make()
    resolver.staged()
    assert not handle.ingest_completion.done()
    resolver.ingested()
    resolver.ingested()
    assert handle.ingest_completion.result(0) is None
    assert not handle.done()
    resolver.resolve(RESULT)
    resolver.ingested()
    assert handle.ingest_completion.exception(0) is None


def test_what_is_committed_was_ingested() -> None:
    handle, resolver = make()
    resolver.resolve(RESULT)
    assert handle.ingest_completion.result(0) is None


def test_a_save_that_fails_once_it_is_ingested_is_still_asked_for() -> None:
    handle, resolver = make()
    unretrieved = UnretrievedErrors()
    resolver.staged()
    resolver.ingested()
    assert handle.ingest_completion.result(0) is None
    resolver.fail(SaveAbortedError("aborted: rank 3"))
    unretrieved.add(resolver.handle.outcome)
    assert handle.ingest_completion.exception(0) is None
    with pytest.raises(SaveAbortedError, match="rank 3"):
        unretrieved.raise_all()


def test_a_save_that_fails_before_it_is_ingested_has_been_asked_for() -> None:
    handle, resolver = make()
    unretrieved = UnretrievedErrors()
    resolver.fail(SaveAbortedError("aborted: rank 3"))
    unretrieved.add(resolver.handle.outcome)
    with pytest.raises(SaveAbortedError, match="rank 3"):
        handle.ingest_completion.result(0)
    unretrieved.raise_all()


def test_a_failure_is_raised_every_time_and_everywhere() -> None:
    handle, resolver = make()
    resolver.staged()
    failure = save_pb2.Failure(rank=3, host="b", message="disk full")
    resolver.fail(SaveAbortedError("aborted: rank 3", [failure]))
    for future in (handle, handle.upload_completion, handle):
        with pytest.raises(SaveAbortedError, match="rank 3") as raised:
            future.result(0)
        assert raised.value.failures[3].message == "disk full"
    assert isinstance(handle.exception(0), SaveAbortedError)
    assert handle.wait(0)


def test_what_is_no_error_of_ours_is_raised_as_it_is() -> None:
    class OwnError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    handle = SaveHandle("j/i/g/1", "/x/y")
    unretrieved, own = UnretrievedErrors(), OwnError(1, 2)
    Resolver(handle).fail(own)
    with pytest.raises(OwnError) as raised:
        handle.result()
    assert raised.value is own

    handle = SaveHandle("j/i/g/2", "/x/z")
    resolver = Resolver(handle)
    resolver.fail(torch.OutOfMemoryError("no room"))
    unretrieved.add(resolver.handle.outcome)
    # An earlier save's is not the call's own.
    with pytest.raises(SaveAbortedError, match="OutOfMemoryError: no room"):
        unretrieved.raise_all()
    for completion in (handle, handle.staging_completion, handle.upload_completion):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            completion.result()


def test_a_timeout_while_waiting_is_no_end() -> None:
    handle = SaveHandle("j/i/g/1", "/x/y")
    with pytest.raises(concurrent.futures.TimeoutError):
        handle.result(0)
    Resolver(handle).fail(TimeoutError("of a device"))
    with pytest.raises(TimeoutError, match="of a device"):
        handle.result()


def test_a_failure_before_staging_fails_the_staging_future_too() -> None:
    handle, resolver = make()
    resolver.fail(SaveAbortedError("no"))
    with pytest.raises(SaveAbortedError):
        handle.staging_completion.result(0)


@pytest.mark.parametrize("how", ["result", "exception", "upload"])
def test_asking_in_any_way_is_asking(how: str) -> None:
    handle, resolver = make()
    with pytest.raises(concurrent.futures.TimeoutError):
        handle.result(0.01)
    assert not resolver.handle.outcome.retrieved
    resolver.fail(SaveAbortedError("no"))
    assert handle.wait(0)
    assert str(handle.status())
    assert not resolver.handle.outcome.retrieved
    if how == "exception":
        handle.exception()
    else:
        with pytest.raises(SaveAbortedError):
            (handle if how == "result" else handle.upload_completion).result()
    assert resolver.handle.outcome.retrieved


def test_a_callback_that_exits_leaves_nothing_undone() -> None:
    handle, resolver = make()
    called: list[object] = []
    for future in (handle.upload_completion, handle.ingest_completion, handle):
        future.add_done_callback(lambda _: sys.exit(1))
        future.add_done_callback(called.append)
    resolver.resolve(SaveResult("/x/y", "a1", 3, 3, {}))
    assert handle.result(0).checkpoint_id == "/x/y"
    assert called == [handle.ingest_completion, handle.upload_completion, handle]


def test_wait_says_whether_it_ended() -> None:
    handle, resolver = make()
    assert not handle.wait(0.01)
    resolver.resolve(RESULT)
    assert handle.wait()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_freed_with_its_last_reference(fails: bool) -> None:
    handle, resolver = make()
    resolver.staged()
    handle.add_done_callback(lambda future: future.exception())
    futures = [handle.staging_completion, handle.upload_completion]
    if fails:
        resolver.fail(SaveAbortedError("no"))
        assert handle.exception() is not None
    else:
        resolver.resolve(RESULT)
        assert handle.result() is RESULT
    gone = weakref.ref(handle)
    del handle, resolver
    assert gone() is None
    assert all(future.done() for future in futures)


@pytest.mark.usefixtures("no_collector")
def test_it_is_freed_after_its_error_was_raised_and_handled() -> None:
    handle, resolver = make()
    try:
        raise SaveAbortedError("no") from OSError("disk")
    except SaveAbortedError as error:
        resolver.fail(error)
    kept = handle.exception()
    assert kept is not None
    assert kept.__traceback__ is None
    with contextlib.suppress(SaveAbortedError):
        handle.result()
    errors = []
    try:
        handle.result()
    except SaveAbortedError as error:
        # As a trainer that logs its errors later would.
        errors.append(error)
    gone = weakref.ref(handle)
    del handle, resolver, kept
    assert gone() is None
    assert len(errors) == 1


def test_a_save_that_failed_while_it_was_staged_stays_failed() -> None:
    handle = SaveHandle("job/abc/g1/1", "/x/y")
    resolver = Resolver(handle)
    resolver.fail(SaveAbortedError("its deadline passed"))
    resolver.staged()
    with pytest.raises(SaveAbortedError, match="its deadline passed"):
        handle.staging_completion.result(0)
    with pytest.raises(SaveAbortedError, match="its deadline passed"):
        handle.result(0)

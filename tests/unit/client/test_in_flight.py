"""How many saves of a client hold staging memory at a time."""

import threading
from collections.abc import Callable

import pytest

from pannier.client.staging import arena_pool
from pannier.client.staging.arena import Arena
from pannier.client.staging.arena_pool import ArenaPool
from pannier.client.staging.in_flight import InFlightSaves
from pannier.common import timeouts
from pannier.common.cgroup import MemoryLimit
from pannier.wire.errors import BusyError, DeadlineError, SaveSkippedError
from support.processes.stretch import BOUND_S


def test_a_save_that_gets_no_staging_memory_in_time_names_those_that_hold_it() -> None:
    saves = InFlightSaves(2, lambda: "job/abc/g1/1 and job/abc/g1/2")
    held = [saves.admit("wait", 1) for _ in range(2)]
    with pytest.raises(DeadlineError) as caught:
        saves.admit("wait", 0.2)
    assert str(caught.value) == (
        "no staging memory became free within 0.2 s: 2 saves hold it (PANNIER_MAX_IN_FLIGHT): "
        "job/abc/g1/1 and job/abc/g1/2; save less often or raise it"
    )
    for each in held:
        each.free()
    assert saves.idle == 2


def arenas(saves: InFlightSaves, room: int) -> Callable[[], Arena]:
    """Acquires arenas of a MiB; no more than ``room`` fit at a time."""

    def acquire() -> Arena:
        if len(saves.pool._in_use) >= room:
            raise BusyError("no room for staging")
        return saves.pool.acquire([1 << 20])

    return acquire


def test_a_save_waits_for_the_staging_memory_of_an_earlier_one_where_both_do_not_fit() -> None:
    saves = InFlightSaves(2)
    acquire = arenas(saves, 1)
    first, second = (saves.admit("wait", 1) for _ in range(2))
    address = saves.stage(first, acquire, "wait", 1).files[0].address
    ended = threading.Timer(0.05, first.free)
    ended.start()
    assert saves.stage(second, acquire, "wait", BOUND_S).files[0].address == address
    ended.join()
    second.free()


@pytest.mark.parametrize(
    ("on_busy", "error"),
    [("skip", SaveSkippedError), ("raise", BusyError), ("wait", DeadlineError)],
)
def test_staging_memory_that_an_earlier_save_holds_is_a_matter_of_on_busy(
    on_busy: str, error: type[Exception]
) -> None:
    saves = InFlightSaves(2)
    acquire = arenas(saves, 1)
    first, second = (saves.admit("wait", 1) for _ in range(2))
    saves.stage(first, acquire, "wait", 1)
    with pytest.raises(error, match="no room for staging"):
        saves.stage(second, acquire, on_busy, 0.2)
    for each in (first, second):
        each.free()


def test_staging_memory_that_no_save_holds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "BUSY_AGAIN_S", 0.01)
    saves = InFlightSaves(2)
    save = saves.admit("wait", 1)
    with pytest.raises(BusyError, match="no room for staging"):
        saves.stage(save, arenas(saves, 0), "wait", 3600)
    save.free()


def test_memory_beyond_the_limit_of_the_process_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = MemoryLimit(256 << 20, 192 << 20, "/job")
    monkeypatch.setattr(arena_pool, "memory_limit", lambda: limit)
    with pytest.raises(BusyError) as caught:
        ArenaPool(2).acquire([1 << 20])
    assert str(caught.value) == (
        "no room for staging: 1048576 bytes needed, 0 free, since the memory limit of control group /job is "
        "256.0 MiB, 192.0 MiB of it in use: save less often, name a spool on a disk (PANNIER_SPOOL; a "
        "sidecar's --spool), or raise the limit"
    )

"""The retry policy: which errors it retries, for how long, and with which pauses."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pannier.common import retry
from pannier.common.deadline import Deadline
from pannier.common.retry import RetryPolicy


class Flaky:
    """Raises ``error`` in its first ``failures`` calls, then returns the number of calls."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or OSError("busy")
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return self.calls

    async def run(self) -> int:
        return self()


def is_os_error(error: BaseException) -> bool:
    return isinstance(error, OSError)


def test_a_call_is_tried_again_after_retriable_errors_only() -> None:
    pauses: list[float] = []
    notes: list[str] = []
    policy = RetryPolicy(
        retriable=is_os_error,
        first_s=1,
        longest_s=4,
        least_s=lambda error: 0.5,
        on_retry=lambda error: notes.append(str(error)),
    )
    assert policy.call(Flaky(3), sleep=pauses.append) == 4
    assert notes == ["busy"] * 3
    assert all(0.5 <= pause <= 4 for pause in pauses)
    with pytest.raises(ValueError, match="wrong"):
        policy.call(Flaky(1, ValueError("wrong")), sleep=pauses.append)
    assert len(pauses) == 3


def test_the_error_of_the_last_try_is_raised_when_the_policy_stops() -> None:
    flaky = Flaky(9)
    policy = RetryPolicy(
        retriable=is_os_error, first_s=1, longest_s=1, stop=lambda: flaky.calls == 2
    )
    with pytest.raises(OSError, match="busy"):
        policy.call(flaky, sleep=lambda seconds: None)
    assert flaky.calls == 2


def test_no_try_begins_after_the_end() -> None:
    flaky = Flaky(9)
    policy = RetryPolicy(
        retriable=is_os_error,
        first_s=1,
        longest_s=1,
        least_s=lambda error: 60,
        end=time.monotonic() + 30,
    )
    with pytest.raises(OSError, match="busy"):
        asyncio.run(policy.run(flaky.run))
    assert flaky.calls == 1


def test_the_last_try_comes_shortly_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(200):
        now = 0.0
        policy = RetryPolicy(retriable=is_os_error, first_s=0.25, longest_s=20, end=8)
        with pytest.raises(OSError, match="busy"):
            policy.call(Flaky(1000), sleep=sleep)
        assert 7.75 < now < 8


def test_a_coroutine_is_tried_again() -> None:
    policy = RetryPolicy(retriable=is_os_error, first_s=0.001, longest_s=0.001)
    assert asyncio.run(policy.run(Flaky(2).run)) == 3


def test_a_deadline_passes_once() -> None:
    assert Deadline(-1).passed
    assert Deadline(-1).remaining() == 0
    assert not Deadline().passed
    assert 50 < Deadline(60).remaining() <= 60

"""Daemons that crash or don't end, as their supervisor handles them, with no process in their place."""

import errno
import logging
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.supervisor import up
from pannier.supervisor.processes import GAVE_UP, ChildProcess, Daemon, Signals


class Played(ChildProcess):
    """A child that ends by SIGKILL, or by no signal."""

    def __init__(self, *, stuck: bool = False) -> None:
        super().__init__(0)
        self.stuck = stuck
        self.signals: list[int] = []

    def poll(self) -> int | None:
        ended = signal.SIGKILL in self.signals and not self.stuck
        return -signal.SIGKILL if ended else None

    def wait(self) -> int:
        raise AssertionError("it may never end")

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)


def test_a_daemon_that_always_crashes_is_started_again_after_the_longest_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "DAEMON_STEADY_S", math.inf)
    caplog.set_level(logging.WARNING)
    daemon = Daemon("it", Played)
    daemon.start_if_due()
    # More than the exponents of a float.
    for _ in range(1100):
        daemon.crashed(1)
    assert daemon.crashes == 1100
    assert daemon.due is not None
    assert daemon.due <= time.monotonic() + timeouts.DAEMON_LONGEST_AGAIN_S
    longest = f"it ended with exit status 1; restart in {timeouts.DAEMON_LONGEST_AGAIN_S:.1f} s"
    assert caplog.messages[-1] == longest


def test_a_daemon_that_can_not_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "DAEMON_AGAIN_S", 100.0)
    monkeypatch.setattr(timeouts, "DAEMON_LONGEST_AGAIN_S", 300.0)
    problem = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    launches = [problem, problem]

    def launch() -> ChildProcess:
        if launches:
            raise launches.pop()
        return Played()

    daemon = Daemon("it", launch)
    for crashes, pause_s in ((1, 100.0), (2, 200.0)):
        daemon.due = 0.0
        # It had run for long before.
        daemon._started = -math.inf
        assert daemon.start_if_due() is problem
        assert (daemon.crashes, daemon.starts) == (crashes, 0)
        assert daemon.poll() is None
        assert not daemon.running()
        restart = f"it can't be started: {problem}; restart in {pause_s:.1f} s"
        assert caplog.messages[-1] == restart
    daemon.start_if_due()
    assert daemon.starts == 0, "it is not due yet"
    daemon.due = 0.0
    assert daemon.start_if_due() is None
    assert daemon.running()


def test_a_pair_of_daemons_that_can_never_be_started_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Record:
        def write(self, directory: Path) -> None:
            pass

    def refuse(run: Any, **settings: Any) -> ChildProcess:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(timeouts, "DAEMON_AGAIN_S", 0.001)
    monkeypatch.setattr(timeouts, "DAEMON_LONGEST_AGAIN_S", 0.001)
    monkeypatch.setattr(up, "fork", refuse)
    record: Any = Record()
    supervisor = up.Supervisor(
        tmp_path / "run", coordinator=lambda: 0, sidecar=lambda: 0, record=record, grace_s=0.0
    )
    assert supervisor.run() == GAVE_UP
    assert "coordinator can't be started: [Errno 11]" in caplog.text
    assert "times in a row; giving up" in caplog.messages[-1]


def test_one_that_is_stuck_in_the_kernel_keeps_no_other_from_being_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "HUNG_CALL_S", 0.01)
    stuck, other = Played(stuck=True), Played()
    daemons = [Daemon("the stuck one", lambda: stuck), Daemon("the other", lambda: other)]
    for daemon in daemons:
        daemon.start_if_due()
    signals = Signals()
    with signals.blocked():
        assert signals.end(daemons, 0.0)
    for child in (stuck, other):
        assert child.signals == [signal.SIGTERM, signal.SIGKILL]
    assert "the stuck one has not ended" in caplog.text
    assert "the other has not ended" not in caplog.text

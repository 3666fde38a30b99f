"""Long waits of the user's own thread show in the log."""

import logging
import re

import pytest

from pannier.client import console
from pannier.common import timeouts
from support.actors.scripted_sidecar import wait_until


def test_a_long_wait_is_logged_by_its_call_and_what_it_waits_for_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.05)
    with caplog.at_level(logging.WARNING), console.logged("save to /x", lambda: "") as wait:
        wait_until(lambda: len(caplog.records) > 0)
        wait.reason = lambda: "rank 3"
        wait_until(lambda: len(caplog.records) > 1)
    for reason in ("an answer", "rank 3"):
        assert re.search(rf"save to /x has waited \d+ s: for {reason}", caplog.text)


def test_a_call_that_waits_now_and_then_logs_what_it_waits_for_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.02)
    looks = []

    def reason() -> str | None:
        looks.append(len(caplog.records))
        return None if len(looks) < 5 else "node-3"

    with caplog.at_level(logging.WARNING), console.logged("load of /x", reason):
        wait_until(lambda: len(caplog.records) > 0)
    assert looks[:5] == [0] * 5
    assert re.search(r"load of /x has waited \d+ s: for node-3", caplog.text)


def test_other_ranks_log_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.05)
    monkeypatch.setattr(timeouts, "WAIT_WARNING_OTHERS_S", 1000)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING), console.logged("save to /x", str):
        monkeypatch.setenv("RANK", "0")
        with console.logged("save to /y", str):
            wait_until(lambda: len(caplog.records) > 1)
    assert "/x" not in caplog.text


def test_a_wait_that_is_over_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.2)
    with caplog.at_level(logging.WARNING):
        with console.logged("save to /x", str):
            pass
        with console.logged("save to /y", str):
            wait_until(lambda: len(caplog.records) > 0)
    assert "/x" not in caplog.text


def test_a_wait_that_an_interruption_has_lost_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.2)
    with caplog.at_level(logging.WARNING):
        console.Wait("save to /x", str)
        with console.logged("save to /y", str):
            wait_until(lambda: len(caplog.records) > 0)
    assert "/x" not in caplog.text

"""Logs of daemons: what a line of JSON has, and whose save it is about."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from pannier.coordinator.config import CoordinatorConfig
from pannier.daemon.logging import bind, set_up_logging
from pannier.wire.errors import ConfigurationError

_log = logging.getLogger("pannier.storage.test")


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Loggers are set up as they were before."""
    root, ours = logging.getLogger(), logging.getLogger("pannier")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def set_up(format: str = "text", **fields: str) -> None:
    # pytest adds its own when the test begins.
    logging.getLogger().handlers.clear()
    set_up_logging(format, **fields)


def parsed(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_what_it_is_about(capsys: Capture) -> None:
    set_up("json", daemon="sidecar", host="node-0")
    _log.info("it is %s\nand more ü", "durable", extra={"job": "llama", "rank": 3, "attempt": ""})
    _log.debug("not logged")
    logging.getLogger("other").info("not logged either")
    (line,) = parsed(capsys)
    assert line.pop("timestamp").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "logger": "pannier.storage.test",
        "message": "it is durable\nand more ü",
        "daemon": "sidecar",
        "host": "node-0",
        "job": "llama",
        "rank": 3,
    }


def test_a_traceback_stays_in_its_line(capsys: Capture) -> None:
    set_up("json")
    try:
        raise ValueError("a bug")
    except ValueError:
        _log.exception("it failed")
    (line,) = parsed(capsys)
    assert line["level"] == "ERROR"
    assert line["traceback"].endswith("ValueError: a bug")


def test_what_a_task_binds_holds_for_all_that_it_calls_and_for_no_other_task(
    capsys: Capture,
) -> None:
    set_up("json")
    attempt = ""

    async def upload(rank: int) -> None:
        nonlocal attempt
        bind(lambda: {"save": "s", "rank": rank, "attempt": attempt})
        await asyncio.sleep(0)
        attempt = "i1-s1"
        _log.warning("trying again")
        await asyncio.gather(asyncio.create_task(inherit()))

    async def inherit() -> None:
        _log.warning("a part", extra={"rank": 9})

    async def run() -> None:
        await asyncio.gather(*(asyncio.create_task(upload(rank)) for rank in (1, 2)))
        _log.warning("outside")

    asyncio.run(run())
    lines = parsed(capsys)
    assert [line.get("rank") for line in lines] == [1, 2, 9, 9, None]
    assert {line.get("attempt") for line in lines[:4]} == {"i1-s1"}
    assert "save" not in lines[-1]


def test_text_is_as_it_was(capsys: Capture) -> None:
    set_up()
    _log.info("it is durable", extra={"job": "llama"})
    assert capsys.readouterr().err.endswith(" INFO pannier.storage.test: it is durable\n")


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"--log-format 'xml' is not one of text, json"):
        CoordinatorConfig(log_format="xml")

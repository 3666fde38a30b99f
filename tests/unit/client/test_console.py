"""What the client logs is seen without logging being set up, and goes where it was set up to go."""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pannier.client import console
from pannier.client.console import log_committed
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import ConfigurationError

TOP = logging.getLogger("pannier")
OURS = logging.getLogger("pannier.client")
SHOWN = ["pannier: saved /x", "pannier: it waits"]
theirs = io.StringIO()


@contextmanager
def unconfigured() -> Iterator[None]:
    """As in a program that has not set up logging; as it was, afterwards."""
    root = logging.getLogger()
    loggers = (root, TOP, OURS)
    before = [(each.handlers[:], each.level) for each in loggers]
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    theirs.seek(0)
    theirs.truncate()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for each, (handlers, level) in zip(loggers, before, strict=True):
            each.handlers[:] = handlers
            each.setLevel(level)


def log() -> None:
    console.info("saved %s", "/x")
    logger = logging.getLogger("pannier.client.console")
    logger.warning("it waits")
    logger.info("a detail")


def configure(level: str) -> None:
    logging.basicConfig(format="%(message)s", level=level, stream=theirs)


@unconfigured()
@pytest.mark.parametrize(
    ("set_up", "ours", "others"),
    [
        (lambda: None, SHOWN, []),
        (lambda: configure("INFO"), [], ["saved /x", "it waits", "a detail"]),
        (lambda: configure("WARNING"), [], ["it waits"]),
        (lambda: TOP.addHandler(logging.StreamHandler(theirs)), [], ["it waits"]),
        (lambda: OURS.addHandler(logging.NullHandler()), [], []),
        (lambda: TOP.setLevel("ERROR"), [], []),
        (lambda: TOP.setLevel("INFO"), [*SHOWN, "pannier: a detail"], []),
        (lambda: logging.disable(logging.INFO), SHOWN[1:], []),
    ],
)
def test_a_programs_own_set_up_counts(
    set_up: Callable[[], None],
    ours: list[str],
    others: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up()
    log()
    assert capsys.readouterr().err.splitlines() == ours
    assert theirs.getvalue().splitlines() == others


@unconfigured()
@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("off", []),
        ("ERROR", []),
        ("Warning", SHOWN[1:]),
        ("info", [*SHOWN, "pannier: a detail"]),
        ("", SHOWN),
    ],
)
def test_the_variable_sets_the_level(
    level: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PANNIER_LOG", level)
    console.install()
    log()
    assert capsys.readouterr().err.splitlines() == lines


@unconfigured()
def test_the_variable_also_silences_a_programs_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANNIER_LOG", "off")
    console.install()
    configure("DEBUG")
    log()
    assert not theirs.getvalue()


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANNIER_LOG", "loud")
    with pytest.raises(ConfigurationError, match="PANNIER_LOG='loud': use one of debug, info"):
        console.install()


@unconfigured()
def test_other_ranks_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    log()
    assert capsys.readouterr().err == "pannier rank 3: saved /x\npannier rank 3: it waits\n"


@pytest.mark.parametrize(
    ("rank", "size", "stalled_s", "durable_s", "line"),
    [
        (
            *(0, 2 << 30, 0.059, 0.94),
            "saved gs://b/run/step-30, 2.0 GiB from 2 ranks, stalled 59 ms, durable after 0.94 s",
        ),
        (0, 10, None, 0.05, "saved gs://b/run/step-30, 10 B from 2 ranks, durable after 50 ms"),
        (1, 10, 1.0, 2.0, ""),
    ],
)
def test_a_save_is_one_line_of_the_groups_first_rank(
    caplog: pytest.LogCaptureFixture,
    rank: int,
    size: int,
    stalled_s: float | None,
    durable_s: float,
    line: str,
) -> None:
    context = sidecar_pb2.SaveContext(
        checkpoint_id="gs://b/run/step-30", ranks=[0, 1], rank=rank, world_size=2
    )
    with caplog.at_level("INFO", "pannier"):
        log_committed(context, size, durable_s, stalled_s)
    assert [record.message for record in caplog.records] == ([line] if line else [])

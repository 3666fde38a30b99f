"""Logging of a daemon: one line per event on standard error, as text or as JSON for a log store.

A record about a save has the fields ``job``, ``save``, ``checkpoint``, ``attempt`` and ``rank``. The
caller passes them as ``extra``, or a task binds them once (:func:`bind`) for all records logged within
it, those of storage included. Text omits them, since its messages name them.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from pythonjsonlogger.json import JsonFormatter

TEXT: Final = "text"
JSON: Final = "json"
FORMATS: Final = (TEXT, JSON)

Fields = Mapping[str, str | int]

_TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_bound: ContextVar[Callable[[], Fields]] = ContextVar("pannier-log-fields", default=dict)


def bind(fields: Callable[[], Fields]) -> None:
    """Adds ``fields()``, evaluated per record, to all that this task logs from now on.

    For tasks of an event loop: tasks that it starts inherit them, others don't.
    """
    _bound.set(fields)


def set_up_logging(format: str = TEXT, level: int = logging.INFO, **fields: str) -> None:
    """Sends Pannier's records from ``level`` on, and warnings of all others, to standard error.

    Args:
        format: one of FORMATS.
        fields: added to every line of JSON, empty ones excepted; a ``job`` also to every line of text.
    """
    handler = logging.StreamHandler()
    if format == JSON:
        handler.setFormatter(
            JsonFormatter(
                ["levelname", "name", "message"],
                timestamp=True,
                rename_fields={"levelname": "level", "name": "logger", "exc_info": "traceback"},
                static_fields={name: text for name, text in fields.items() if text},
                json_ensure_ascii=False,
            )
        )
        handler.addFilter(_add_fields)
    else:
        job = f" [{fields['job']}]" if fields.get("job") else ""
        handler.setFormatter(logging.Formatter(_TEXT_FORMAT.replace("%(name)s", f"%(name)s{job}")))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("pannier").setLevel(level)


def _add_fields(record: logging.LogRecord) -> bool:
    known: dict[str, Any] = record.__dict__
    for name, value in _bound.get()().items():
        known.setdefault(name, value)
    # An empty value is not known yet.
    for name in ("attempt", "rank"):
        if known.get(name) == "":
            del known[name]
    return True

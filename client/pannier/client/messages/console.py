"""Where the records of the ``pannier`` logger go by default: to stderr, one line each.

In: log records, and ``PANNIER_LOG``. Out: lines ``pannier: ...``, as long as the program has not set
up logging itself: once the ``pannier`` logger or one above it has a handler of the program's, records
go there alone, at the levels that the program chose. By default warnings and the lines of
:func:`info` are shown. ``PANNIER_LOG`` sets the level of the ``pannier`` logger: a level's name, or
``off``. Thread-safe.
"""

import logging
import os
import sys
from typing import Any, Final

from pannier.client.process_group import process_rank
from pannier.wire.errors import ConfigurationError

_VARIABLE: Final = "PANNIER_LOG"
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
_top: Final = logging.getLogger("pannier")
_log: Final = logging.getLogger("pannier.client")


class _Stderr(logging.Handler):
    """Writes what no other handler gets."""

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        if _has_other_handlers(logging.getLogger(record.name)):
            return
        try:
            rank = process_rank()
            who = f"pannier rank {rank}" if rank else "pannier"
            # Looked up now: programs and tests replace it. One call: ranks share a terminal.
            sys.stderr.write(f"{who}: {self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler: logging must not end the program
            self.handleError(record)


_stderr: Final = _Stderr()


def install() -> None:
    """Adds the default handler; once.

    Raises ConfigurationError: ``PANNIER_LOG`` is not a level.
    """
    if _stderr not in _top.handlers:
        _top.addHandler(_stderr)
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return
    level = _LEVELS.get(text.lower())
    if level is None:
        raise ConfigurationError(f"{_VARIABLE}={text!r}: use one of {', '.join(_LEVELS)}")
    _top.setLevel(level)


def info(message: str, *args: Any) -> None:
    """Logs a line of level INFO that is shown even if the program has not set up logging."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(message, *args, stacklevel=2)
    elif _log.manager.disable < logging.INFO and not _is_configured():
        _log.handle(
            _log.makeRecord(_log.name, logging.INFO, __file__, 0, message, args, exc_info=None)
        )


def _is_configured() -> bool:
    return bool(_log.level or _top.level) or _has_other_handlers(_log)


def _has_other_handlers(logger: logging.Logger | None) -> bool:
    while logger is not None:
        if any(handler is not _stderr for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False

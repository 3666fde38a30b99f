"""Logging of a daemon: one line per event on standard error."""

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: int = logging.INFO) -> None:
    """Sends our own records from ``level`` on, and everyone else's warnings, to standard error."""
    logging.basicConfig(format=_FORMAT, level=logging.WARNING)
    logging.getLogger("pannier").setLevel(level)

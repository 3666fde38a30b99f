"""The lines that the first rank of a group logs for each of its loads.

In: what a load has read. Out: ``loaded gs://b/run/step-30, 2.0 GiB in 0.4 s, 18 files: 18 own spool``.
Pure, but for the log; any thread.
"""

import logging
from collections.abc import Sequence

from pannier.client.messages import console
from pannier.common.units import size_text

_log = logging.getLogger(__name__)


def log_loaded(checkpoint_id: str, size: int, seconds: float, files: str) -> None:
    """Logs the line.

    Args:
        size: bytes of all ranks.
        files: the numbers of files by source.
    """
    console.info("loaded %s, %s in %.1f s, %s", checkpoint_id, size_text(size), seconds, files)


def warn_of_keys(
    checkpoint_id: str, unread: tuple[int, Sequence[str]], cast: tuple[int, Sequence[str]]
) -> None:
    """Warns of keys that were not read, and of tensors that were read into a narrower dtype; by count and first keys."""
    if unread[0]:
        _log.warning("%s: the load left %s, which no rank's state has", checkpoint_id, unread)
    if cast[0]:
        _log.warning(
            "%s: values may have changed by the load into a narrower dtype than the stored one, of %s",
            checkpoint_id,
            cast,
        )

"""The line that the first rank of a group logs for each of its loads.

In: what a load has read. Out: ``loaded gs://b/run/step-30, 2.0 GiB in 0.4 s, 18 files: 18 own spool``.
Pure, but for the log; any thread.
"""

from pannier.client.messages import console
from pannier.common.units import size_text


def log_loaded(checkpoint_id: str, size: int, seconds: float, files: str) -> None:
    """Logs the line.

    Args:
        size: bytes of all ranks.
        files: the numbers of files by source.
    """
    console.info("loaded %s, %s in %.1f s, %s", checkpoint_id, size_text(size), seconds, files)

"""The line that rank 0 logs where a checkpoint's place isn't as the user wrote it.

In: the text and the place that it means. Out: ``GS://b/run/step-1 is gs://b/run/step-1``, once per directory
and process. Any thread.
"""

import os
import posixpath

from pannier.client.messages import console
from pannier.client.process_group import process_rank

_logged: set[str] = set()


def log_resolved(place: str | os.PathLike[str], resolved: str) -> None:
    """Logs the line, unless both are the same but for slashes at the end."""
    text, directory = os.fspath(place), posixpath.dirname(resolved)
    if text.rstrip("/") == resolved or process_rank() or {directory, resolved} & _logged:
        return
    # A root that was given itself explains the checkpoints below it.
    _logged.update((directory, resolved))
    console.info("%s is %s", text, resolved)

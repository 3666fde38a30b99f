"""The line that rank 0 logs when a checkpoint's location is resolved to another text than the user gave.

In: the user's text and the resolved location. Out: ``GS://b/run/step-1 is gs://b/run/step-1``, once per
directory and process. Any thread.
"""

import os
import posixpath

from pannier.client.messages import console
from pannier.client.process_group import process_rank

_logged: set[str] = set()


def log_resolved(place: str | os.PathLike[str], resolved: str) -> None:
    """Logs the line, unless both are equal apart from trailing slashes."""
    text, directory = os.fspath(place), posixpath.dirname(resolved)
    if text.rstrip("/") == resolved or process_rank() or {directory, resolved} & _logged:
        return
    # The line of a root also covers the checkpoints below it.
    _logged.update((directory, resolved))
    console.info("%s is %s", text, resolved)

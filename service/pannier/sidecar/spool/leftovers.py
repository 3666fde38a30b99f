"""What a sidecar that has ended left in its spool.

In: the spool's directory, without a sidecar. Out: whether something there awaits upload; if not, the files' removal.
"""

import logging
from contextlib import suppress
from pathlib import Path

from pannier.sidecar.spool import journal
from pannier.sidecar.spool.rank_states import RankStates
from pannier.wire.errors import ConfigurationError

_log = logging.getLogger(__name__)


def discard(spool: Path) -> bool:
    """Removes the sidecar's files, and the directory if nothing else is there.

    False: some are not in storage yet; all stay, and the log says so. The next sidecar on the spool uploads them.
    """
    if _awaits_upload(spool):
        _log.warning(
            "%s holds data that is not in storage yet: it stays, and the next sidecar on it, such as that of the "
            "job's next start on this host, uploads it",
            spool,
        )
        return False
    for path in [*spool.glob("*.data"), *(spool / name for name in journal.FILES)]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # others' files, or a mount point
        spool.rmdir()
    return True


def _awaits_upload(spool: Path) -> bool:
    """Whether the journal names ranks that may still become durable, or can't be read."""
    try:
        contents = journal.Journal(spool).read()
    except ConfigurationError as error:
        _log.warning("%s", error)
        return True
    states = RankStates()
    for record in contents.records:
        states.apply(record)
    return contents.damaged_at is not None or any(state.awaits_upload for state in states)

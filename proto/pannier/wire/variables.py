"""The names of Pannier's environment variables, so that a misspelt one isn't ignored silently.

In: an environment. Out: warnings. Any thread.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Final

KNOWN: Final = frozenset(
    f"PANNIER_{name}"
    for name in (
        *("ABANDONED_AFTER", "ADDRESS", "ALLOW", "ALLOW_UID", "CHECK_REPLICAS", "COORDINATOR"),
        *("EMBEDDED", "FAILURE_DOMAIN", "GRACE", "GRACE_SUPERSEDED", "HEALTH", "HOST", "IDLE_EXIT"),
        *("INSECURE_LISTEN", "JOB", "JOBS", "KEEP", "KEEP_BEST", "KEEP_EVERY", "KEEP_NEWEST"),
        *("LISTEN", "LOG", "LOG_FORMAT", "MAX_IN_FLIGHT", "MEMORY", "METRICS", "NICE", "PEERS"),
        *("PEERS_NAME", "PLANNER", "PLAN_TIMEOUT", "REPLICAS", "REPLICAS_LIMIT", "RESTORE_BUDGET"),
        *("RETENTION_PATTERN", "RUNTIME_DIR", "SAVE_TIMEOUT", "SIDECAR", "SPOOL", "SPOOL_BUDGET"),
        *("STORAGE_OPTIONS", "SUSPECT_AFTER", "TIME_SCALE", "TLS_CA", "TLS_CERT", "TLS_KEY"),
        *("TOKEN_FILE", "TRANSPORT", "UPLOAD_LIMIT", "UPLOAD_THREADS"),
    )
)
_LIKE: Final = 0.85
"""Of 1: how alike a misspelt name is. Others may be of other programs."""
_OURS: Final = re.compile(r"PANNIE(?!.*_(SERVICE|PORT)(_|$)).*")
"""Not those that Kubernetes sets for a service, such as PANNIER_COORDINATOR_PORT."""

_warned: set[str] = set()


def misspelt(environment: Iterable[str]) -> list[str]:
    """A warning for each variable that is nearly one of Pannier's, once in this process."""
    found = []
    for name in sorted(environment):
        if name in KNOWN or name in _warned or not _OURS.fullmatch(name):
            continue
        if nearest := difflib.get_close_matches(name, KNOWN, 1, _LIKE):
            _warned.add(name)
            found.append(f"{name} is no variable of Pannier and is ignored: {nearest[0]}?")
    return found

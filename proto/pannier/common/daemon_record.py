"""The record that ``pannier up`` writes beside its sockets: whose daemons run there, and where they store.

In: the environment of ``pannier up``. Out: a file in the runtime directory. From it a trainer with another
environment sees that these daemons store elsewhere, and can name daemons of another version. The file has
names and hashes of the variables that decide where checkpoints go and which are kept, but no values. Any
thread.
"""

import dataclasses
import hashlib
import json
import os
import pwd
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pannier.common import lifetime
from pannier.wire.version import WIRE_VERSION, package_version

Variables = dict[str, str | None]
"""SHA-256 of the values by name, hex. None: set by a flag, which every trainer accepts."""

START_LOCK: Final = "start.lock"
"""Held by a process that starts the daemons, or removes the files of those that have exited."""
_FILE: Final = "up.json"
_SPOOL: Final = "spool.path"
_DECISIVE: Final = re.compile(
    r"PANNIER_(COORDINATOR|SPOOL|STORAGE_OPTIONS|ALLOW|PLANNER)"
    r"|PANNIER_(KEEP\w*|RETENTION_PATTERN|GRACE_SUPERSEDED)"
    r"|STORAGE_EMULATOR_HOST|CLOUDSDK_CONFIG|FSSPEC_\w+"
    r"|GOOGLE_(APPLICATION_CREDENTIALS|CLOUD_PROJECT|CLOUD_QUOTA_PROJECT|CLOUD_UNIVERSE_DOMAIN)"
    r"|AWS_(ENDPOINT_URL\w*|IGNORE_CONFIGURED_ENDPOINT_URLS|(DEFAULT_)?(PROFILE|REGION)|ROLE_ARN)"
    r"|AWS_(CONFIG_FILE|SHARED_CREDENTIALS_FILE|WEB_IDENTITY_TOKEN_FILE|CA_BUNDLE)"
)
"""Endpoints, profiles, paths, regions and Pannier's own settings."""
_PANNIERS_OWN: Final = re.compile(r"PANNIER_\w+")
_ROTATING: Final = re.compile(r"FSSPEC_\w*(KEY|SECRET|TOKEN|PASSWORD)\w*")
"""Credentials may change every hour and don't change the destination."""
_CREDENTIALS: Final = re.compile(
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN)|" + _ROTATING.pattern
)
"""Credentials themselves: a process keeps those that it was started with."""


@dataclass(frozen=True)
class DaemonRecord:
    """See the module. Other versions read it: fields may only be added, with a default."""

    variables: Variables
    """See :func:`decisive_variables`."""
    prefix: str
    """Python environment that they run in (``sys.prefix``)."""
    version: str
    """Of the package."""
    wire_version: int
    pid: int
    """Of their supervisor."""
    user: str
    exits_idle: bool
    """Whether they exit when they are idle, as those that a client started do."""
    ended_by: str | None = "an earlier version, which doesn't say what ends them"
    """See :func:`pannier.common.lifetime.ended_by`."""
    credentials: str | None = None
    """See :func:`credentials_digest`; None: an earlier version, which doesn't say."""
    started: str = "an unknown time"
    """When, UTC."""

    @classmethod
    def of_this_process(cls, variables: Variables, *, exits_idle: bool) -> "DaemonRecord":
        """The record of a supervisor, which is this process."""
        return cls(
            variables=variables,
            prefix=sys.prefix,
            version=package_version(),
            wire_version=WIRE_VERSION,
            pid=os.getpid(),
            user=user_name(os.getuid()),
            exits_idle=exits_idle,
            ended_by=lifetime.ended_by(os.environ),
            credentials=credentials_digest(os.environ),
            started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        )

    @property
    def description(self) -> str:
        """Whose they are, for messages."""
        return (
            f"pannier {self.version} of the environment {self.prefix}, process {self.pid} of user "
            f"{self.user}"
        )

    @property
    def speaks_ours(self) -> bool:
        """Whether clients of this version can use them."""
        return self.wire_version == WIRE_VERSION

    def mismatch(self) -> str:
        """Why this process had better have daemons of its own, for messages; empty: no reason."""
        if not self.speaks_ours:
            return f"have wire version {self.wire_version}, this process has {WIRE_VERSION}"
        if self.version != package_version():
            return f"are of another version, this process is pannier {package_version()}"
        if not os.path.isdir(self.prefix):
            return "run in an environment that no longer exists"
        return ""

    def write(self, directory: Path) -> None:
        """Writes it into a runtime directory; atomically, since trainers may be reading it."""
        new = directory / f"{_FILE}.new"
        new.write_text(json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n")
        new.chmod(0o600)
        new.replace(directory / _FILE)


def read(directory: Path) -> DaemonRecord | None:
    """The record of the daemons that run, or ran last, in a runtime directory; None: no record."""
    try:
        found = json.loads((directory / _FILE).read_text())
    except FileNotFoundError:
        return None
    known = {field.name for field in dataclasses.fields(DaemonRecord)}
    return DaemonRecord(**{name: value for name, value in found.items() if name in known})


def decisive_variables(environment: Mapping[str, str]) -> Variables:
    """The variables that decide where checkpoints go and which are kept, if they are set and not empty."""
    return {
        name: hashlib.sha256(os.fsencode(value)).hexdigest()
        for name, value in environment.items()
        if value and _DECISIVE.fullmatch(name) and not _ROTATING.fullmatch(name)
    }


def credentials_digest(environment: Mapping[str, str]) -> str:
    """SHA-256, hex, of the credentials that are variables themselves; empty: there are none."""
    found = {n: v for n, v in sorted(environment.items()) if v and _CREDENTIALS.fullmatch(n)}
    return hashlib.sha256(os.fsencode(json.dumps(found))).hexdigest() if found else ""


def storage_variables(
    environment: Mapping[str, str], options: Mapping[str, object]
) -> dict[str, str]:
    """The part of :func:`decisive_variables` that decides where bytes go: endpoints, accounts and paths to credentials.

    Args:
        options: storage options, from a flag or ``PANNIER_STORAGE_OPTIONS``.
    """
    found = {
        name: str(value)
        for name, value in decisive_variables(environment).items()
        if not _PANNIERS_OWN.fullmatch(name)
    }
    if options:
        text = json.dumps(options, sort_keys=True, default=str)
        found["PANNIER_STORAGE_OPTIONS"] = hashlib.sha256(os.fsencode(text)).hexdigest()
    return found


def record_spool(directory: Path, spool: Path) -> None:
    """Notes, in a runtime directory, the spool that its sidecar has locked."""
    new = directory / f"{_SPOOL}.new"
    new.write_text(str(spool))
    new.replace(directory / _SPOOL)


def recorded_spool(directory: Path) -> Path | None:
    """The spool that the sidecar of a runtime directory had locked last; None: not known."""
    try:
        return Path((directory / _SPOOL).read_text())
    except FileNotFoundError:
        return None


def differing(theirs: Variables, ours: Variables) -> list[str]:
    """Sorted names of the variables that differ, or that only one side has."""
    return sorted(
        name
        for name in theirs.keys() | ours.keys()
        if theirs.get(name) != ours.get(name) and theirs.get(name, "") is not None
    )


def user_name(uid: int) -> str:
    """A user's name, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

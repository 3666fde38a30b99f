"""The environment variables that decide where checkpoints go: variables in, a record of hashes out.

``pannier up`` writes the record of its environment beside its sockets, so that a trainer with other
settings doesn't use its daemons. The record has names and hashes, no values. Pure; any thread.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Final

Record = dict[str, str | None]
"""SHA-256 of the values by name, hex. None: set by a flag, which every trainer accepts."""

FILE: Final = "surroundings.json"
"""Its name in the runtime directory."""
_DECISIVE: Final = re.compile(
    r"PANNIER_(COORDINATOR|SPOOL|STORAGE_OPTIONS|ALLOW|PLANNER|KEEP\w*)"
    r"|STORAGE_EMULATOR_HOST|CLOUDSDK_CONFIG|FSSPEC_\w+"
    r"|GOOGLE_(APPLICATION_CREDENTIALS|CLOUD_PROJECT|CLOUD_QUOTA_PROJECT|CLOUD_UNIVERSE_DOMAIN)"
    r"|AWS_(ENDPOINT_URL\w*|IGNORE_CONFIGURED_ENDPOINT_URLS|(DEFAULT_)?(PROFILE|REGION)|ROLE_ARN)"
    r"|AWS_(CONFIG_FILE|SHARED_CREDENTIALS_FILE|WEB_IDENTITY_TOKEN_FILE|CA_BUNDLE)"
)
"""Endpoints, profiles, paths, regions and Pannier's own settings."""
_ROTATING: Final = re.compile(r"FSSPEC_\w*(KEY|SECRET|TOKEN|PASSWORD)\w*")
"""Credentials may change every hour and don't change the destination."""


def record(environment: Mapping[str, str]) -> Record:
    """The decisive variables that are set and not empty."""
    return {
        name: hashlib.sha256(os.fsencode(value)).hexdigest()
        for name, value in environment.items()
        if value and _DECISIVE.fullmatch(name) and not _ROTATING.fullmatch(name)
    }


def differing(theirs: Record, ours: Record) -> list[str]:
    """Sorted names of the variables that differ, or that only one side has."""
    return sorted(
        name
        for name in theirs.keys() | ours.keys()
        if theirs.get(name) != ours.get(name) and theirs.get(name, "") is not None
    )


def encode(surroundings: Record) -> str:
    """The record as the text of its file."""
    return json.dumps(surroundings, indent=1, sort_keys=True) + "\n"


def decode(text: str) -> Record:
    """The record in the text of its file."""
    found: Record = json.loads(text)
    return found

"""The jobs that one sidecar serves: a directory with a file for each, read again when it changes.

In: ``--jobs DIRECTORY`` with ``<job>.json`` files, like a Secret that Kubernetes mounts and replaces.
Out: jobs. A file that can't be used stops no other job: what it said before stays, and what is wrong
with it is told until it is right. Tokens are forgotten once they are read: digests stay.

    {"tokens": ["..."], "allow": ["gs://bucket/llama"], "coordinator": "host:port", "spool_budget": "164GiB"}
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pannier.common.sizes import parse_size
from pannier.storage.url import parse
from pannier.v1 import save_pb2
from pannier.wire.addresses import parse_address
from pannier.wire.auth_token import check_token, digest, read_private
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.object_names import check_save_id

_log = logging.getLogger(__name__)

SUFFIX: Final = ".json"
MOST: Final = 64
"""Jobs of one sidecar: each has its own sockets, threads and journal."""
_LARGEST: Final = 64 << 10
KNOWN: Final = ("tokens", "allow", "coordinator", "spool_budget")
"""Fields of a job's file."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a sidecar knows of one of its jobs. Raises ConfigurationError naming the file's field."""

    name: str
    digests: frozenset[bytes] = field(repr=False)
    """Of its tokens: two while one takes the other's place."""
    allow: tuple[str, ...]
    """Roots that its checkpoints must lie below."""
    coordinator: str | None = None
    """None: the sidecar's own."""
    spool_budget: int | None = None
    """Most bytes of its spool; None: what the sidecar has."""

    def __post_init__(self) -> None:
        if not self.digests:
            raise ConfigurationError('"tokens" is empty: nobody could save')
        if not self.allow:
            raise ConfigurationError(
                '"allow" is empty: name the roots that checkpoints of the job must lie below'
            )
        for root in self.allow:
            try:
                parse(root)
            except InvalidRequestError as error:
                raise ConfigurationError(f'"allow": {error}') from error
        if self.coordinator is not None:
            parse_address(self.coordinator, setting='"coordinator"')

    def same_but_tokens(self, other: "Job") -> bool:
        """Whether nothing but who may call is another."""
        return replace(self, digests=other.digests) == other


class Jobs:
    """What lies in one directory. Not for several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigurationError when it isn't a directory that can be read."""
        self._directory = directory
        self._known: dict[str, Job] = {}
        self.problems: dict[str, str] = {}
        """What is wrong, by file's name."""
        try:
            os.listdir(directory)
        except OSError as error:
            raise ConfigurationError(
                f"--jobs={directory} can't be read: {error.strerror}: name a directory with a file "
                f"<job>{SUFFIX} for each job"
            ) from error

    def look(self) -> Mapping[str, Job]:
        """All jobs by name, as the files are now or last were right."""
        problems: dict[str, str] = {}
        try:
            names = sorted(os.listdir(self._directory))
        except OSError as error:
            # Half replaced, or unmounted: nobody loses a job by that.
            problems[str(self._directory)] = f"--jobs={self._directory}: {error.strerror}"
            names = [name + SUFFIX for name in self._known]
        found: dict[str, Job] = {}
        for name in names:
            # Kubernetes keeps its own things below "..": what the names link to.
            if name.startswith(".") or not name.endswith(SUFFIX):
                continue
            job = name.removesuffix(SUFFIX)
            try:
                if len(found) >= MOST:
                    raise ConfigurationError(f"it is one more than {MOST} jobs")
                found[job] = read_job(self._directory / name)
            except ConfigurationError as error:
                problems[name] = f"{self._directory / name}: {error}"
                if job in self._known:
                    found[job] = self._known[job]
        for job, others in _shared(found).items():
            known = self._known.get(job)
            if known is not None and known.digests == found[job].digests:
                continue  # the others came later
            problems[job + SUFFIX] = (
                f"{self._directory / job}{SUFFIX}: a token of it is also one of {', '.join(others)}: "
                "they would be one job; make new ones"
            )
            del found[job]
        self._tell(problems)
        self._known = found
        return found

    def _tell(self, problems: dict[str, str]) -> None:
        for name, problem in problems.items():
            if self.problems.get(name) != problem:
                _log.error("%s", problem)
        self.problems = problems


def read_job(path: Path) -> Job:
    """The job of one file. Raises ConfigurationError saying what is wrong, never with a token."""
    name = path.name.removesuffix(SUFFIX)
    try:
        check_save_id(save_pb2.SaveId(job=name, incarnation="x", group="x", number=1))
    except InvalidRequestError as error:
        raise ConfigurationError(str(error)) from error
    content = read_private(path, what="it", most=_LARGEST)
    try:
        told = json.loads(content)
    except (ValueError, RecursionError) as error:
        # Not the error's own text, nor itself: they may have what stands there.
        at = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigurationError(f"it is no JSON{at}") from None
    if not isinstance(told, dict):
        raise ConfigurationError(f"it holds no JSON object with {', '.join(KNOWN)}")
    unknown = sorted(told.keys() - set(KNOWN))
    if unknown:
        raise ConfigurationError(f"{unknown[0][:64]!r} is none of {', '.join(KNOWN)}")
    tokens = _texts(told, "tokens")
    return Job(
        name=name,
        digests=frozenset(digest(check_token(each, '"tokens"')) for each in tokens),
        allow=tuple(_texts(told, "allow")),
        coordinator=_text(told, "coordinator"),
        spool_budget=_size(told, "spool_budget"),
    )


def _texts(told: dict[str, Any], key: str) -> list[str]:
    value = told.get(key, [])
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise ConfigurationError(f'"{key}" is no list of texts')
    return value


def _text(told: dict[str, Any], key: str) -> str | None:
    value = told.get(key)
    if not (value is None or isinstance(value, str)):
        raise ConfigurationError(f'"{key}" is no text')
    return value


def _size(told: dict[str, Any], key: str) -> int | None:
    value = told.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigurationError(f'"{key}" is no size like "164GiB"')
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise ConfigurationError(f'"{key}": {error}') from error


def _shared(jobs: Mapping[str, Job]) -> dict[str, list[str]]:
    """Jobs that have a token of another's, with those others."""
    by_digest: defaultdict[bytes, list[str]] = defaultdict(list)
    for name, job in jobs.items():
        for each in job.digests:
            by_digest[each].append(name)
    found: dict[str, list[str]] = {}
    for names in by_digest.values():
        for name in names if len(names) > 1 else ():
            others = found.setdefault(name, [])
            others += [each for each in names if each != name and each not in others]
    return found

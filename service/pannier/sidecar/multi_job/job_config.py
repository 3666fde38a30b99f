"""The jobs that a node's sidecars serve: a directory with a file for each, read again when it changes.

In: ``--jobs DIRECTORY`` with ``<job>.json`` files, like a Secret that Kubernetes mounts and replaces.
Out: jobs. An invalid file affects no other job: its last valid content stays in force, and its problem is
reported until it is corrected. Tokens are not kept, only their digests.

    {"tokens": ["..."], "allow": ["gs://bucket/llama"], "coordinator": "host:port", "spool_budget": "164GiB",
     "memory": "192MiB"}
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pannier.common.locations import parse
from pannier.common.units import parse_size
from pannier.wire.addresses import parse_address
from pannier.wire.auth_token import check_token, digest, read_private
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.object_names import check_job

_log = logging.getLogger(__name__)

SUFFIX: Final = ".json"
MOST: Final = 64
"""Jobs of one node: each has its own process, sockets and journal."""
_LARGEST: Final = 64 << 10
KNOWN: Final = ("tokens", "allow", "coordinator", "spool_budget", "memory")
"""Fields of a job's file."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The settings of one job. Raises ConfigurationError naming the file's field."""

    name: str
    digests: frozenset[bytes] = field(repr=False)
    """Digests of its tokens: two while one replaces the other."""
    allow: tuple[str, ...]
    """Roots that its checkpoints must lie below."""
    coordinator: str | None = None
    """Address of the job's coordinator; None: ``--coordinator``."""
    spool_budget: int | None = None
    """Most bytes of its spool; None: ``--spool-budget``."""
    memory: int | None = None
    """Most bytes of its upload buffers; None: ``--memory``."""
    path: Path | None = field(default=None, compare=False)
    """Its file, whose tokens its sidecar reads again when it changes."""
    operator: bytes | None = field(default=None, compare=False, repr=False)
    """Digest of the token that the node's operators use."""
    leaving: bool = field(default=False, compare=False)
    """Its file was removed: no token is valid any more, and what was ingested is still uploaded."""

    def __post_init__(self) -> None:
        if not self.digests:
            raise ConfigurationError('"tokens" is empty: no client could save')
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

    def same_but_tokens(self, other: "JobConfig") -> bool:
        """Whether at most the tokens differ."""
        return replace(self, digests=other.digests) == other


class JobDirectory:
    """The job files of one directory. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigurationError when it isn't a directory that can be read."""
        self._directory = directory
        self._known: dict[str, JobConfig] = {}
        self.problems: dict[str, str] = {}
        """Problems by the file's name."""
        try:
            os.listdir(directory)
        except OSError as error:
            raise ConfigurationError(
                f"--jobs={directory} can't be read: {error.strerror}: name a directory with a file "
                f"<job>{SUFFIX} for each job"
            ) from error

    def read(self) -> Mapping[str, JobConfig]:
        """All jobs by name, each with the last valid content of its file."""
        problems: dict[str, str] = {}
        try:
            names = sorted(os.listdir(self._directory))
        except OSError as error:
            # The directory is just being replaced, or unmounted: all jobs stay.
            problems[str(self._directory)] = f"--jobs={self._directory}: {error.strerror}"
            names = [name + SUFFIX for name in self._known]
        # They keep their places, also when a new job's name comes before theirs.
        kept = self._known.keys() & {name.removesuffix(SUFFIX) for name in names}
        found: dict[str, JobConfig] = {}
        for name in names:
            # Kubernetes keeps the files that the names link to below "..".
            if name.startswith(".") or not name.endswith(SUFFIX):
                continue
            job = name.removesuffix(SUFFIX)
            try:
                if job not in kept and len(found.keys() | kept) >= MOST:
                    raise ConfigurationError(
                        f"a node serves at most {MOST} jobs: this one is not served"
                    )
                found[job] = read_job(self._directory / name)
            except ConfigurationError as error:
                problems[name] = f"{self._directory / name}: {error}"
                if job in self._known:
                    found[job] = self._known[job]
        # A job that is put back to its known tokens may share these with another job.
        while refused := self._refuse_shared(found):
            for job, others in refused.items():
                path = self._directory / f"{job}{SUFFIX}"
                problems[path.name] = f"{path}: {_shared_with(others)}"
        self._report(problems)
        self._known = found
        return found

    def _refuse_shared(self, found: dict[str, JobConfig]) -> dict[str, list[str]]:
        """Replaces jobs that share tokens by their known content; removes those that are new.

        Returns these jobs, each with those that it shares tokens with. A job with its known tokens keeps
        them: the others added them later.
        """
        refused = {}
        for job, others in _shared(found).items():
            known = self._known.get(job)
            if known is None:
                del found[job]
            elif known.digests != found[job].digests:
                found[job] = known
            else:
                continue
            refused[job] = others
        return refused

    def _report(self, problems: dict[str, str]) -> None:
        for name, problem in problems.items():
            if self.problems.get(name) != problem:
                _log.error("%s", problem)
        self.problems = problems


def read_job(path: Path) -> JobConfig:
    """Reads the file of one job. Raises ConfigurationError, whose text never has a token."""
    name = path.name.removesuffix(SUFFIX)
    try:
        check_job(name)
    except InvalidRequestError as error:
        raise ConfigurationError(str(error)) from error
    content = read_private(path, what="it", most=_LARGEST)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        # Without the error and its text, which may have parts of the file.
        at = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigurationError(f"it is not JSON{at}") from None
    if not isinstance(fields, dict):
        raise ConfigurationError(f"it holds no JSON object with {', '.join(KNOWN)}")
    unknown = sorted(fields.keys() - set(KNOWN))
    if unknown:
        raise ConfigurationError(f"{unknown[0][:64]!r} is none of {', '.join(KNOWN)}")
    tokens = _texts(fields, "tokens")
    return JobConfig(
        name=name,
        digests=frozenset(digest(check_token(each, '"tokens"')) for each in tokens),
        allow=tuple(_texts(fields, "allow")),
        coordinator=_text(fields, "coordinator"),
        spool_budget=_size(fields, "spool_budget"),
        memory=_size(fields, "memory"),
        path=path,
    )


def read_digests(path: Path) -> frozenset[bytes]:
    """Digests of the tokens in a job's file. Raises ConfigurationError when another job's file has one, too."""
    digests = read_job(path).digests
    others = []
    for other in sorted(path.parent.glob(f"*{SUFFIX}")):
        if other.name != path.name and not other.name.startswith("."):
            with suppress(ConfigurationError):  # reported by the supervisor
                if digests & read_job(other).digests:
                    others.append(other.name.removesuffix(SUFFIX))
    if others:
        raise ConfigurationError(_shared_with(others))
    return digests


def _shared_with(others: list[str]) -> str:
    return f"one of its tokens is also one of {', '.join(others)}: make new ones, so that each job has its own"


def _texts(fields: dict[str, Any], key: str) -> list[str]:
    value = fields.get(key, [])
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise ConfigurationError(f'"{key}" is not a list of strings')
    return value


def _text(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if not (value is None or isinstance(value, str)):
        raise ConfigurationError(f'"{key}" is not a string')
    return value


def _size(fields: dict[str, Any], key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigurationError(f'"{key}" is not a size like "164GiB"')
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise ConfigurationError(f'"{key}": {error}') from error


def _shared(jobs: Mapping[str, JobConfig]) -> dict[str, list[str]]:
    """Jobs that share a token, each with the others."""
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

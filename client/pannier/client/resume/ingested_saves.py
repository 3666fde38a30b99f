"""Waits until saves that every rank had ingested are committed, so that a restart loses no step.

In: a root and a pattern, or one checkpoint id. Out: the end of its attempts that are newer than the newest
checkpoint. The sidecars that hold them and the job's coordinator finish them; this module only observes
that, in storage and in the status of this host's sidecars. If all receipts are in storage and no coordinator
commits, it runs ``pannier recover``. Attempts that can't be finished are described, with ranks and hosts.
Blocking; for one thread.
"""

import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from pannier.client import console
from pannier.client.loading import catalog
from pannier.client.loading.filesystem import MissingError, StorageDir, open_dir
from pannier.client.resume.sidecar_status import SidecarStatus
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.common.locations import CHILDREN, Pattern
from pannier.common.message_json import seconds_of
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError
from pannier.wire.failures import failures_text, rank_list, shorten
from pannier.wire.records import parse_decision, parse_manifest

_log = logging.getLogger(__name__)

_ENDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_HOSTS: Final = 4
"""Hosts spelled out in a text."""


@dataclass
class Unfinished:
    """An attempt that is not decided, or whose decision isn't carried out yet."""

    directory: StorageDir
    attempt: str
    status: save_pb2.SaveStatus | None = None
    """From a sidecar of this host; None: none knows it."""
    members: Mapping[int, str] = field(default_factory=dict)
    """Ranks and their hosts, from the manifest; empty: not read yet, or it has none."""
    durable: frozenset[int] = frozenset()
    """Ranks whose receipt is in storage."""
    ordinal: int = 0
    """See :attr:`pannier.wire.object_names.Attempt.ordinal`."""

    def order(self, begun: catalog.IncarnationStarts) -> tuple[Any, ...]:
        """Sort key of its attempt, which it must have."""
        attempt = dataclasses.replace(_parsed(self.attempt), ordinal=self.ordinal)
        return catalog.order_key(attempt, begun)

    @property
    def key(self) -> tuple[str, str]:
        """Identifies it."""
        return self.directory.url, self.attempt or (self.status.id if self.status else "")

    @property
    def is_complete(self) -> bool:
        """Whether all receipts are in storage."""
        return bool(self.members) and self.durable.issuperset(self.members)

    @property
    def lacks(self) -> str:
        """What it waits for, with ranks and hosts."""
        if self.is_complete:
            return "the job's coordinator to commit it: all its receipts are in storage"
        by_host: dict[str, list[int]] = {}
        for rank, host in sorted(self.members.items()):
            if rank not in self.durable:
                by_host.setdefault(host, []).append(rank)
        hosts = [f"host {host}: ranks {rank_list(ranks)}" for host, ranks in by_host.items()]
        if self.status is not None and self.status.waiting_on.text:
            return self.status.waiting_on.text
        if not hosts:
            return "the job's coordinator to plan it"
        return f"the receipts of {shorten(hosts, _HOSTS, separator='; ')}"


class IngestedSaves:
    """See the module.

    Args:
        status: of this host's sidecars.
        start_daemons: starts embedded ones, which upload what is left in the spool; None: a sidecar is
            configured.
    """

    def __init__(self, status: SidecarStatus, start_daemons: Callable[[], object]) -> None:
        self._status = status
        self._start_daemons = start_daemons

    def resume_here(self) -> None:
        """Starts the upload of what this host's spool holds; every rank calls it. Logs why that fails."""
        try:
            self._start_daemons()
        except PannierError as error:
            _log.warning(
                "what this host's spool may hold of earlier saves isn't uploaded: %s", error
            )

    def finish_newest(
        self,
        root: str | os.PathLike[str],
        pattern: Pattern,
        options: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> None:
        """Waits until the newest attempt that can be committed below a root is committed; logs the others.

        Args:
            options: of the fsspec file system.
            timeout_s: for all of them together.
        """
        directory = open_dir(root, options)
        deadline = Deadline(timeout_s)
        ended: set[tuple[str, str]] = set()
        while (found := self._newest_unfinished(directory, pattern, ended)) is not None:
            problem = self._await_end(found, deadline)
            if not problem:
                break
            _log.warning("%s is no checkpoint yet, and not used: %s", found.directory.url, problem)
            ended.add(found.key)

    def finish_one(self, directory: StorageDir, timeout_s: float) -> str | None:
        """Waits for the newest attempt at a checkpoint id that has no ``.metadata``.

        Returns why it can't be committed; empty: it is; None: no sidecar of this host knows of one, and
        none has all its receipts in storage.
        """
        attempts = catalog.attempts_of([directory])
        candidates = self._candidates(directory.parent, CHILDREN, [directory], attempts)
        own = [each for each in candidates if each.directory.url == directory.url]
        own = _newer(own, None, None)
        found = max(own, key=lambda each: _order(each, None), default=None)
        if found is None:
            return None
        self._look(found)
        if found.status is None and not found.is_complete:
            return None
        return self._await_end(found, Deadline(timeout_s))

    def _newest_unfinished(
        self, root: StorageDir, pattern: Pattern, ended: Collection[tuple[str, str]]
    ) -> Unfinished | None:
        standing = catalog.newest(root, pattern)
        directories = catalog.directories(root, pattern)
        attempts = catalog.attempts_of(directories)
        begun = catalog.incarnation_start_times(directories, attempts, pattern)
        found = self._candidates(root, pattern, directories, attempts)
        floor = None
        if standing is not None and standing.attempt:
            floor = dataclasses.replace(_parsed(standing.attempt), ordinal=standing.ordinal)
        newest_first = sorted(
            (each for each in _newer(found, floor, begun) if each.key not in ended),
            key=lambda each: _order(each, begun),
            reverse=True,
        )
        return next((each for each in newest_first if self._end(each) is None), None)

    def _candidates(
        self,
        root: StorageDir,
        pattern: Pattern,
        directories: Sequence[StorageDir],
        attempts: Sequence[Sequence[object_names.Attempt]],
    ) -> list[Unfinished]:
        """The attempts at these checkpoints, and the undecided saves below the root that sidecars list."""
        found = {}
        places = {directory.url: directory for directory in directories}
        for directory, own in zip(directories, attempts, strict=True):
            for attempt in own:
                each = Unfinished(directory, attempt.name)
                found[each.key] = each
        for save in self._status.saves(root.url, pattern):
            if save.state not in _ENDED:
                place = places.get(save.checkpoint_id)
                place = place or root.child(save.checkpoint_id.removeprefix(root.url).lstrip("/"))
                each = Unfinished(place, save.attempt, save)
                found.setdefault(each.key, each).status = save
        return list(found.values())

    def _await_end(self, found: Unfinished, deadline: Deadline) -> str:
        """Empty once it is committed; else why it can't be."""
        began = seen = time.monotonic()
        complete_since: float | None = None
        problem = ""
        what = f"{found.directory.url}, which an earlier start left ingested,"
        with console.logged(what, lambda: found.lacks):
            while True:
                before = found.durable
                self._look(found)
                end = self._end(found)
                if end is not None:
                    return end
                now = time.monotonic()
                if found.status is not None or found.durable != before:
                    seen = now
                waited = f"after {now - began:.0f} s still waiting for {found.lacks}"
                if problem:
                    waited = (
                        f"its receipts are all in storage, but `pannier recover` failed: {problem}"
                    )
                if deadline.passed:
                    return waited
                if now - seen > timeouts.INGESTED_SIGN_S:
                    unknown = "; no sidecar of this host knows the save any more"
                    return waited if problem else f"{waited}{unknown}"
                if not found.is_complete:
                    complete_since, problem = None, ""
                elif complete_since is None:
                    complete_since = now
                elif now - complete_since > timeouts.INGESTED_COMMIT_S:
                    problem = _commit(found, deadline)
                    complete_since = None
                time.sleep(min(timeouts.INGESTED_POLL_S, deadline.remaining()))

    def _look(self, found: Unfinished) -> None:
        """Updates what is known of it. Raises StorageError."""
        listed = [
            save
            for save in self._status.saves(found.directory.parent.url)
            if save.checkpoint_id == found.directory.url
            and (save.attempt == found.attempt or (found.status and save.id == found.status.id))
        ]
        found.status = listed[0] if listed else None
        if found.status is not None and found.status.attempt:
            found.attempt = found.status.attempt
        if not found.attempt:
            return
        if not found.members:
            found.members = _read_members(found.directory, found.attempt)
        try:
            place = found.directory.child(object_names.receipts_prefix(found.attempt).rstrip("/"))
            names = {entry.name for entry in place.list()}
        except MissingError:
            names = set()
        found.durable = frozenset(rank for rank in found.members if str(rank) in names)

    def _end(self, found: Unfinished) -> str | None:
        """None: it hasn't ended; empty: it is committed; else why it can't be committed any more."""
        if found.attempt:
            key = object_names.decision(found.attempt)
            content = found.directory.find(key)
            if content is not None:
                where = f"{found.directory.url}/{key}"
                decision = parse_decision(content, found.attempt, where)
                if decision.outcome != records_pb2.OUTCOME_COMMIT:
                    return (
                        f"it was aborted: {failures_text(decision.failures) or 'no cause is known'}"
                    )
                standing = catalog.committed_attempt(found.directory)
                if standing and standing >= _parsed(found.attempt):
                    return ""
                return _describe_loss(found.directory, found.attempt)
        if found.status is None or found.status.state not in _ENDED:
            return None
        if found.status.state == save_pb2.SAVE_STATE_COMMITTED:
            return ""
        return f"it was aborted: {failures_text(found.status.failures) or 'no cause is known'}"


def _commit(found: Unfinished, deadline: Deadline) -> str:
    """Commits it from storage alone, as its coordinator would; returns why that failed, or ""."""
    command = [sys.executable, "-m", "pannier.cli", "recover", found.directory.url]
    _log.info("all receipts of %s are in storage: %s", found.directory.url, " ".join(command[1:]))
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(timeouts.INGESTED_RECOVER_S, deadline.remaining()),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s can't be committed from storage: %s", found.directory.url, error)
        return str(error)
    if not ended.returncode:
        return ""
    problem = ended.stderr.strip()[-500:] or f"exit status {ended.returncode}"
    _log.warning("pannier recover %s: %s", found.directory.url, problem)
    return problem


def _read_members(directory: StorageDir, attempt: str) -> dict[int, str]:
    """Ranks and hosts of an attempt; empty: it has no manifest yet, or it can't be read."""
    content = directory.find(object_names.manifest(attempt))
    if content is None:
        return {}
    try:
        manifest = records_pb2.PlanManifest.FromString(content)
    except DecodeError as error:
        _log.warning("the manifest of %s at %s is damaged: %s", attempt, directory.url, error)
        return {}
    return {member.rank: member.host for member in manifest.members}


def _describe_loss(directory: StorageDir, attempt: str) -> str | None:
    """Why an attempt with a COMMIT isn't the directory's checkpoint any more; None: it isn't yet.

    By the rules of ``pannier recover``.
    """
    if directory.find(object_names.removal_mark(attempt)) is not None:
        return "it was committed, and is being removed"
    try:
        decided = directory.stat(object_names.decision(attempt)).modified
        directory.stat(object_names.manifest(attempt))
    except MissingError:
        # The decision is the last object that goes.
        return "it was committed, and has been removed"
    with suppress(MissingError):
        written = directory.stat(object_names.METADATA).modified
        # An older one is yet to be replaced by this attempt's.
        if written > decided and catalog.find_commit(directory) is None:
            return "it was committed, and was replaced by a checkpoint that Pannier didn't write"
    return None


def _newer(
    found: Sequence[Unfinished],
    floor: object_names.Attempt | None,
    begun: catalog.IncarnationStarts,
) -> list[Unfinished]:
    """Those that are newer than the attempt ``floor``, with their ordinals; those without an attempt, too.

    Of each group it reads down to the first attempt that is older.
    """
    newer = [each for each in found if not each.attempt]
    own = None if floor is None else catalog.order_key(floor, begun)
    attempts = [(_parsed(each.attempt), each) for each in found if each.attempt]
    for chain in itertools.chain.from_iterable(catalog.by_group(attempts, begun)):
        for attempt, each in chain:
            if own is not None and floor is not None:
                place = catalog.order_key(attempt, begun)[:2]
                if place < own[:2] or (
                    (attempt.incarnation, attempt.group) == (floor.incarnation, floor.group)
                    and attempt.number <= floor.number
                ):
                    break
            each.ordinal = _read_ordinal(each.directory, attempt)
            if own is not None and each.ordinal and each.order(begun) <= own:
                break
            newer.append(each)
    return newer


def _read_ordinal(directory: StorageDir, attempt: object_names.Attempt) -> int:
    """The ordinal of an attempt, from its decision or manifest; 0 without either, or if that is damaged.

    Raises StorageError.
    """
    for name, parse in (
        (object_names.decision(attempt.name), parse_decision),
        (object_names.manifest(attempt.name), parse_manifest),
    ):
        content = directory.find(name)
        if content is not None:
            with suppress(IntegrityError):
                return parse(content, attempt.name, f"{directory.url}/{name}").ordinal
    return 0


def _parsed(attempt: str) -> object_names.Attempt:
    return object_names.Attempt.parse(attempt)


def _order(found: Unfinished, begun: catalog.IncarnationStarts) -> tuple[Any, ...]:
    """Sort key, newest last: what has no attempt yet is newer than what has one."""
    created = seconds_of(found.status.created_at) if found.status is not None else 0.0
    return not found.attempt, found.order(begun) if found.attempt else (), created

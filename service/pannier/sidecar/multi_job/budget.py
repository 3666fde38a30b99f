"""What the spools of one sidecar share: a file system, and the most bytes that all may take together.

In: spools, one per job. Out: how much is left for one of them, and space that others have reserved and
don't use. One lock serves all of them, so that two that need room can't wait for each other; all
but joining and leaving is called with it held.
"""

import os
import threading
from pathlib import Path
from typing import Protocol


class Member(Protocol):
    """A spool, as the others see it."""

    @property
    def reserved(self) -> int:
        """Bytes of all its files."""

    def unused(self) -> int:
        """Bytes of those that nobody uses; with the lock held."""

    def evict_one(self, job: str) -> bool:
        """Removes one of these; False: there is none. With the lock held."""


class Commons:
    """Of one sidecar.

    Args:
        total: most bytes of all spools together; None: what the file system has.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.lock = threading.Lock()
        self._members: list[Member] = []
        self._wanted = False

    def join(self, member: Member) -> None:
        """Its files count from now on."""
        with self.lock:
            self._members.append(member)

    def leave(self, member: Member) -> None:
        """They are gone, or closed."""
        with self.lock:
            self._members.remove(member)

    def take_wanted(self) -> bool:
        """Whether somebody found no room among all since this was last asked. Without the lock."""
        with self.lock:
            wanted, self._wanted = self._wanted, False
            return wanted

    def want(self) -> None:
        """There was no room, and that is not because of the spool's own budget."""
        self._wanted = True

    def left(self) -> int | None:
        """Bytes that may still be reserved; None: as many as the file system has."""
        if self.total is None:
            return None
        return max(0, self.total - sum(each.reserved for each in self._members))

    def room(self, directory: Path) -> tuple[int, int]:
        """Most bytes that all can have, and how many could still be taken. Without the lock."""
        space = os.statvfs(directory)
        capacity = (space.f_blocks - space.f_bfree + space.f_bavail) * space.f_frsize
        free = space.f_bavail * space.f_frsize
        with self.lock:
            left = self.left()
            unused = sum(each.unused() for each in self._members)
        if self.total is None or left is None:
            return capacity, free + unused
        return min(capacity, self.total) if capacity else self.total, min(free, left) + unused

    def unused(self, but: Member) -> int:
        """Bytes that the others have reserved and nobody uses."""
        return sum(each.unused() for each in self._members if each is not but)

    def evict_one(self, but: Member) -> bool:
        """Removes a file that nobody uses, of whichever other has most of these."""
        others = [each for each in self._members if each is not but]
        return any(each.evict_one("") for each in sorted(others, key=lambda each: -each.unused()))

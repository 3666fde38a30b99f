"""The budget that the spools of one sidecar process share: a file system, and a limit on their sum.

In: spools, one per job. Out: how much is left for one of them, and files of the others that no save
uses. One lock serves all spools, so that two that need room can't wait for each other; everything
but joining and leaving is called with it held.
"""

import os
import threading
from pathlib import Path
from typing import Protocol


class Member(Protocol):
    """A spool, as the others see it."""

    def reserved(self) -> int:
        """Bytes of all its files; with the lock held."""

    def unused(self) -> int:
        """Bytes of the files that no save uses; with the lock held."""

    def evict_one(self, job: str) -> bool:
        """Removes one of these; False: there is none. With the lock held."""


class SharedBudget:
    """The budget of one process.

    Args:
        total: most bytes of all spools together; None: what the file system has.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.lock = threading.Lock()
        self._members: list[Member] = []
        self._room_requested = False

    def join(self, member: Member) -> None:
        """Counts a spool's files from now on."""
        with self.lock:
            self._members.append(member)

    def leave(self, member: Member) -> None:
        """Counts a spool's files no longer: they are removed, or closed."""
        with self.lock:
            self._members.remove(member)

    def request_room(self) -> None:
        """A spool found no room, and not because of its own budget."""
        self._room_requested = True

    def take_request(self) -> bool:
        """Whether a spool requested room since the last call. Without the lock."""
        with self.lock:
            requested, self._room_requested = self._room_requested, False
            return requested

    def left(self) -> int | None:
        """Bytes that may still be reserved; None: as many as the file system has."""
        if self.total is None:
            return None
        return max(0, self.total - sum(each.reserved() for each in self._members))

    def room(self, directory: Path) -> tuple[int, int]:
        """Most bytes that all spools can have, and how many are free. Without the lock."""
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
        """Bytes that the other spools have reserved and no save uses."""
        return sum(each.unused() for each in self._members if each is not but)

    def evict_one(self, but: Member) -> bool:
        """Removes an unused file of the other spool that has most of them."""
        others = [each for each in self._members if each is not but]
        return any(each.evict_one("") for each in sorted(others, key=lambda each: -each.unused()))

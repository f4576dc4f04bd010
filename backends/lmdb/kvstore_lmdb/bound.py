"""The longest the file may get, kept although liblmdb decides where a record goes."""

from __future__ import annotations

import time
from typing import Final

from kvstore_lmdb.environment import Environment
from kvstore_lmdb.space import EVICT_AT, FILE_FACTOR, Space

_AFFORD: Final = 4  # records of growth that must fit below the bound to put without care
_READER_WAIT_S: Final = 0.06  # our own readers renew within 50 ms
_STEP: Final = 0.05  # of the capacity, kept free in addition after each growth that no reader explains
_NEAREST: Final = 0.85  # share of the capacity filled when not one record of growth fits any more
_BEYOND: Final = 0.6  # ... and when the bound was passed all the same
_FORGIVE: Final = 256  # records without growth after which a step is taken back


class FileBound:
    """Decides whether a record may be put when the file is nearly as long as it may get.

    The file never shrinks, and it grows when no free run of pages fits a record: because an old
    reader keeps freed pages from being reused, or because the free pages are scattered.  Near the
    bound records go in one by one, growth is watched, puts are refused while a reader is in the
    way, and more pages are kept free the more often the file grew nevertheless.  Called under the
    environment's write lock.
    """

    def __init__(self, environment: Environment, space: Space) -> None:
        self._environment: Final = environment
        self._space: Final = space
        self._stuck_at: int | None = None  # transaction in which the file grew although room was free
        self._waited = False
        self._steps = 0
        self._calm = 0

    def near(self, pages: int) -> bool:
        """Whether storing ``pages`` needs care."""
        return self.last_page() + _AFFORD * pages > self._space.limits.file

    def admit(self, pages: int) -> bool:
        """Prepare to store one record near the bound; False to refuse it."""
        if self._reader_in_the_way():
            return False
        last, limit = self.last_page(), self._space.limits.file
        share, room = EVICT_AT - _STEP * self._steps, pages
        if last + pages > limit:  # it must fit: leave room for a second one, as free pages may lie apart
            share, room = min(share, _NEAREST if last <= limit else _BEYOND), 2 * pages
        with self._environment.env.begin() as txn:
            live = self._space.measure(txn)
        excess = live + room - int(limit / FILE_FACTOR * max(share, _STEP))
        if excess > 0:
            self._space.evict_for_now(excess)
        return True

    def watch(self, before: int) -> None:
        """Learn from a commit near the bound; ``before`` is :meth:`last_page` ahead of it."""
        info = self._environment.env.info()
        if info["last_pgno"] > before:
            self._stuck_at, self._waited, self._calm = info["last_txnid"], False, 0
            return
        self._calm += 1
        if self._calm >= _FORGIVE and self._steps:
            self._calm, self._steps = 0, self._steps - 1

    def spent(self) -> bool:
        """Whether the file is at its bound, so that nothing should be written that can be left out."""
        return self.near(1)

    def last_page(self) -> int:
        """Highest page in use, as of the last commit."""
        return int(self._environment.env.info()["last_pgno"])

    def _reader_in_the_way(self) -> bool:
        """After a growth: whether a reader older than it is still there; waits a moment, once."""
        if self._stuck_at is None:
            return False
        first = oldest = oldest_reader(self._environment.env.readers())
        end = time.monotonic() + (0.0 if self._waited else _READER_WAIT_S)
        while oldest is not None and oldest < self._stuck_at:
            if time.monotonic() >= end:
                self._waited = True
                return True
            time.sleep(0.005)
            oldest = oldest_reader(self._environment.env.readers())
        if not self._waited and (first is None or first >= self._stuck_at):
            self._steps += 1  # nobody was in the way: the free pages are scattered
        self._stuck_at = None
        return False


def oldest_reader(table: str) -> int | None:
    """Return the oldest transaction id in the text of ``Environment.readers``; None without readers."""
    ids = [int(fields[2]) for line in table.splitlines() if len(fields := line.split()) == 3 and fields[2].isdigit()]
    return min(ids, default=None)

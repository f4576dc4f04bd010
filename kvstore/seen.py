"""Remembers which blocks were used once, so that the second use can be told."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Final

_LIMIT: Final = 1 << 16  # digests; at most about 8 MiB


class SeenOnce:
    """A bounded set of digests, oldest forgotten first; thread-safe."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._digests: dict[bytes, None] = {}

    def among(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these were noted before."""
        with self._lock:
            return self._digests.keys() & digests

    def note(self, digests: Sequence[bytes]) -> None:
        """Remember these."""
        with self._lock:
            for digest in digests:
                self._digests[digest] = None
            excess = len(self._digests) - self._limit
            if excess > 0:
                # a few at a time would walk over the gaps of all earlier ones again and again
                for old in list(itertools.islice(self._digests, excess + self._limit // 8)):
                    del self._digests[old]

    def forget(self, digests: Sequence[bytes]) -> None:
        """Drop these."""
        with self._lock:
            for digest in digests:
                self._digests.pop(digest, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._digests.clear()


class Settled:
    """Blocks whose further uses change nothing, because every tier that wants used blocks has them.

    Lets a call that L1 served alone end after one set test.  Forgetting is always safe, so the
    memory is emptied now and then: what other processes evicted is noticed by that, and the
    tiers are told of a use.  Thread-safe.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._digests: set[bytes] = set()
        self.version = 0
        """Goes up whenever something is forgotten."""

    def covers(self, digests: Sequence[bytes]) -> bool:
        """Whether all of these are settled."""
        return self._digests.issuperset(digests)

    def note(self, digests: Sequence[bytes], version: int) -> None:
        """Remember these, unless something was forgotten since :attr:`version` was read."""
        with self._lock:
            if version == self.version and len(self._digests) + len(digests) <= self._limit:
                self._digests.update(digests)

    def forget(self, digests: Sequence[bytes]) -> None:
        """Drop these."""
        with self._lock:
            self.version += 1
            self._digests.difference_update(digests)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.version += 1
            self._digests = set()


class FreshChains:
    """When the blocks before a sequence's newest one were last used; thread-safe.

    An engine that puts block after block uses all blocks before it each time, but telling L1 and
    the tiers so each time would cost more than the put.  Ages matter on the scale of evictions, so
    it is done now and then.

    Args:
        every_s: Seconds between two times.
        limit: Sequences remembered.
    """

    def __init__(self, every_s: float = 10.0, limit: int = 1 << 12) -> None:
        self._every_s = every_s
        self._limit = limit
        self._lock = threading.Lock()
        self._used_at: dict[bytes, float] = {}  # digest of a sequence's newest block -> time

    def due(self, parent: bytes | None, newest: bytes) -> bool:
        """Note that blocks up to ``newest`` were put behind ``parent``; says whether to refresh what is before.

        Blocks without a parent begin a sequence: they are all there is to refresh.
        """
        now = time.monotonic()
        with self._lock:
            used_at = now if parent is None else self._used_at.pop(parent, float("-inf"))
            due = now - used_at > self._every_s
            self._used_at[newest] = now if due else used_at
            while len(self._used_at) > self._limit:
                del self._used_at[next(iter(self._used_at))]
        return due

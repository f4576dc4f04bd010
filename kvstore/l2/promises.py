"""What a tier said lately about prefixes it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey

_LIMIT: Final = 1024  # prefixes; about 150 KiB
_LIFETIME_S: Final = 60.0  # between asking and reading lie milliseconds, or a place in an engine's queue


class Promises:
    """Ends of prefixes that were found or read lately; a hint for the next read.  Thread-safe.

    A digest stands for everything before it, so one digest a prefix is enough.

    Args:
        clock: Monotonic seconds.
        limit: Digests kept, the newest ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, limit: int = _LIMIT) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._ends: dict[bytes, float] = {}  # digest to the end of its life, oldest first

    def note(self, digest: bytes) -> None:
        """The tier holds the blocks up to this one."""
        self.note_each((digest,))

    def note_each(self, digests: Iterable[bytes]) -> None:
        """The tier holds the blocks up to each of these."""
        until = self._clock() + _LIFETIME_S
        with self._lock:
            for digest in digests:
                self._ends.pop(digest, None)
                self._ends[digest] = until
            while len(self._ends) > self._limit:
                del self._ends[next(iter(self._ends))]

    def until(self, key: KVCacheKey, start: int) -> int:
        """Index behind the last block of ``key`` that is promised, ``start`` when none is."""
        if not self._ends:
            return start
        now, digests, ends = self._clock(), key.digests, self._ends
        for i in range(len(digests) - 1, start - 1, -1):
            if ends.get(digests[i], 0.0) > now:
                return i + 1
        return start

"""Remembers which blocks were used once, so that the second use can be told."""

from __future__ import annotations

import itertools
import threading
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

"""How much of the store no prefix reaches any more, found by looking through the index bit by bit."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from kvstore_nvme.slot import PAGE_BYTES, tag_of
from kvstore_nvme.store import Store

_EVERY_S: Final = 60.0
_PORTION: Final = 1024  # records in one transaction, about 2 ms


class Orphans:
    """Counts records whose parent is not stored; one thread at a time.

    Attributes:
        nbytes: Space of them as of the last complete look.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._next_look = 0.0
        self._after = b""
        self._portions: list[np.ndarray[tuple[int, int], np.dtype[np.uint64]]] = []

    def look(self, store: Store, until: float) -> None:
        """Go on looking until a monotonic time, one portion at least; the end of a look settles ``nbytes``."""
        if time.monotonic() < self._next_look:
            return
        while True:
            with store.reading() as txn:
                found = store.index.listed(txn, self._after, _PORTION)
            if not found:
                self.nbytes = self._count()
                self._next_look = time.monotonic() + _EVERY_S
                self._after, self._portions = b"", []
                return
            self._after = found[-1][0]
            rows = [(tag_of(name), entry.parent_tag, entry.pages) for name, entry in found]
            self._portions.append(np.array(rows, np.uint64))
            if time.monotonic() >= until:
                return

    def _count(self) -> int:
        if not self._portions:
            return 0
        tags, parents, pages = np.concatenate(self._portions).T
        lost = (parents != 0) & ~np.isin(parents, tags)
        return int(pages[lost].sum()) * PAGE_BYTES

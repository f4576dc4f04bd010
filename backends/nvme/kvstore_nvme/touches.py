"""Uses of records, gathered in memory and written to the index now and then; lossy on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final

from kvstore_nvme.index import Transaction
from kvstore_nvme.store import Store

_KEPT: Final = 1 << 16
_PORTION: Final = 512  # uses written in one transaction


class Touches:
    """The uses noted by one process; thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store: Final = store
        self._names: dict[bytes, None] = {}
        self._lock: Final = threading.Lock()

    def note(self, names: Iterable[bytes]) -> None:
        """Note uses, least valuable first; the oldest are lost when there are too many."""
        with self._lock:
            for name in names:
                self._names.pop(name, None)
                self._names[name] = None
            while len(self._names) > _KEPT:
                del self._names[next(iter(self._names))]

    def flush(self) -> bool:
        """Write one portion; False when none is left."""
        if not self._names:
            return False
        with self._store.writing() as txn:
            self.write(txn, _PORTION)
        return True

    def write(self, txn: Transaction, most: int) -> None:
        """Write up to ``most`` uses in a transaction that is open anyway."""
        with self._lock:
            names = list(self._names)[:most]
            for name in names:
                del self._names[name]
        now = int(time.time())
        for name in names:
            self._store.index.touch(txn, name, now)

"""Which stored records lost the block before them, counted in the transactions that change it."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Any, Final

from kvstore_lmdb.entry import MAX_PARENT_BYTES, Entry
from kvstore_lmdb.environment import Environment

Transaction = Any  # lmdb.Transaction is generic in the stubs only

_TOTAL: Final = b"kin"
_ABSENT: Final = b"kin:"
_TOTALS: Final = struct.Struct("<QQ")  # absent parents that are noted, bytes of orphans
_NOTE: Final = struct.Struct("<QB")  # bytes of live children, whether the parent was stored once


class Kinship:
    """Changes of one transaction to what is known about parents and children.

    An orphan is a live record whose parent was stored once and has left: no prefix reaches it.  An
    index line says how many bytes its record's children have; for a parent that is not there a note
    does.  A run of blocks is stored and evicted together as a rule, so changes are collected and
    what remains of them is written by :meth:`settle`: about one line for each run.

    Args:
        environment: The store.
        txn: A write transaction.
    """

    def __init__(self, environment: Environment, txn: Transaction) -> None:
        self._txn: Final = txn
        self._index: Final = environment.trees.index
        self._notes: Final = environment.trees.notes
        self._changes: Final[defaultdict[bytes, int]] = defaultdict(int)  # parent -> bytes of children
        self._n_absent, self._orphaned = totals(environment, txn)
        self._before: Final = (self._n_absent, self._orphaned)

    def stored(self, name: bytes, parent: bytes, nbytes: int) -> int:
        """Note a new record; returns the bytes of its children."""
        children = self._changes.pop(name, 0)
        if self._n_absent:
            noted, left = self._note(name)
            if noted:
                children += noted
                self._write(name, 0, left=left)
                self._orphaned -= noted if left else 0
        if parent:
            self._changes[parent] += nbytes
        return max(0, children)

    def removed(self, name: bytes, entry: Entry) -> None:
        """Note that a record has left, whatever the reason."""
        children = entry.children_bytes + self._changes.pop(name, 0)
        if children > 0 and len(name) <= MAX_PARENT_BYTES:
            self._write(name, children, left=True)
            self._orphaned += children
        if entry.parent:
            self._changes[entry.parent] -= entry.nbytes

    def settle(self) -> None:
        """Write what was collected; before the transaction commits."""
        for parent, change in self._changes.items():
            if not change:
                continue
            found = self._txn.get(parent, db=self._index)
            if found is not None:
                entry = Entry.parse(found)
                line = entry.pack(children_bytes=max(0, entry.children_bytes + change))
                self._txn.put(parent, line, db=self._index)
                continue
            noted, left = self._note(parent)
            now = max(0, noted + change)
            self._write(parent, now, left=left)
            self._orphaned += now - noted if left else 0
        if (self._n_absent, self._orphaned) != self._before:
            counts = _TOTALS.pack(max(0, self._n_absent), max(0, self._orphaned))
            self._txn.put(_TOTAL, counts, db=self._notes)

    def _note(self, parent: bytes) -> tuple[int, bool]:
        """Bytes of the children of a parent that is not there, and whether it was once."""
        found = self._txn.get(_ABSENT + parent, db=self._notes)
        if found is None:
            return 0, False
        nbytes, left = _NOTE.unpack(found)
        return nbytes, bool(left)

    def _write(self, parent: bytes, nbytes: int, *, left: bool) -> None:
        key = _ABSENT + parent
        if nbytes:
            new = self._txn.put(key, _NOTE.pack(nbytes, left), db=self._notes, overwrite=False)
            if new:
                self._n_absent += 1
            else:
                self._txn.put(key, _NOTE.pack(nbytes, left), db=self._notes)
        elif self._txn.delete(key, db=self._notes):
            self._n_absent -= 1


def totals(environment: Environment, txn: Transaction) -> tuple[int, int]:
    """Absent parents that are noted, and bytes of the orphans."""
    found = txn.get(_TOTAL, db=environment.trees.notes)
    if found is None:
        return 0, 0
    n_absent, orphaned = _TOTALS.unpack(found)
    return int(n_absent), int(orphaned)

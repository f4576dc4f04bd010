"""Room on the medium: what is live, what is evicted, and how far the file may grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvstore_lmdb import notes
from kvstore_lmdb.entry import Entry, sequence_key
from kvstore_lmdb.environment import Environment
from kvstore_lmdb.kinship import Kinship

Transaction = Any  # lmdb.Transaction is generic in the stubs only

EVICT_AT: Final = 0.98  # of the capacity: tree pages of the next transaction fit in the rest
FILE_FACTOR: Final = 1.25  # longest file per capacity; variable sizes need about a fifth of free pages
FILE_EXTRA_BYTES: Final = 1 << 20  # 1 MiB, for trees and lists of free pages
_SPARE_PAGES: Final = 64  # of FILE_EXTRA_BYTES, kept for transactions that store no record
_TXN_RECORDS: Final = 64  # records evicted in one transaction
_TXN_PAGES: Final = 1024  # pages freed in one transaction: liblmdb stores their list, 8 bytes each, as one value
_AHEAD: Final = 0.005  # of the capacity, evicted beyond need: not every put pays a transaction, and runs stay free
_OVERFLOW_HEADER: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in pages.

    Attributes:
        capacity: Live pages.
        file: Last page that a put may reach.
    """

    capacity: int
    file: int


class Space:
    """Keeps live records within the capacity and the file within its bound.

    Every method that writes is called under the environment's write lock.  Pages freed in one
    transaction are reusable only from the second next one on, and not before older readers end;
    therefore room is made ahead of need, in transactions of its own.
    """

    def __init__(self, environment: Environment, capacity_bytes: int) -> None:
        self._environment: Final = environment
        self._page_bytes: Final = environment.page_bytes
        self._opened_pages: Final = environment.opened.opened_bytes // environment.page_bytes
        self._capacity_bytes = capacity_bytes
        self._limits = self._limits_of(capacity_bytes)

    def pages(self, nbytes: int) -> int:
        """Pages of a record; small ones share a leaf page but count as one."""
        return (_OVERFLOW_HEADER - 1 + nbytes) // self._page_bytes + 1

    def live_pages(self, txn: Transaction) -> int:
        """Pages of all records with their trees, exact: liblmdb counts them in each transaction."""
        trees = self._environment.trees
        total = 0
        for tree in (trees.records, trees.index, trees.recency):
            found = txn.stat(tree)
            total += found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
        return int(total)

    @property
    def capacity_bytes(self) -> int:
        """Capacity as of the last :meth:`measure`."""
        return self._capacity_bytes

    @property
    def limits(self) -> Limits:
        """Bounds as of the last :meth:`measure`."""
        return self._limits

    def measure(self, txn: Transaction) -> int:
        """Return the live pages and take over the capacity that the store holds now.

        Another process may have changed it.
        """
        capacity_bytes = notes.stored_capacity(self._environment, txn)
        if capacity_bytes is not None and capacity_bytes != self._capacity_bytes:
            self._capacity_bytes = capacity_bytes
            self._limits = self._limits_of(capacity_bytes)
        return self.live_pages(txn)

    def _limits_of(self, capacity_bytes: int) -> Limits:
        longest = int(capacity_bytes * FILE_FACTOR) + FILE_EXTRA_BYTES
        file = max(longest // self._page_bytes - _SPARE_PAGES, self._opened_pages)
        return Limits(capacity_bytes // self._page_bytes, file)

    def fits(self, nbytes: int) -> bool:
        """Whether a record can be stored at all."""
        return self.pages(nbytes) <= int(self._limits.capacity * EVICT_AT) - 8

    def excess(self, live: int, pages: int) -> int:
        """Pages above the threshold if ``pages`` come to ``live``; without an excess nothing is evicted."""
        return live + pages - int(self._limits.capacity * EVICT_AT)

    def make_room(self, live: int, pages: int) -> None:
        """Evict, oldest use first, until ``pages`` more than ``live`` stay below the threshold."""
        excess = self.excess(live, pages)
        if excess > 0:
            capacity = self._limits.capacity
            ahead = max(int(capacity * _AHEAD), 2 * pages)
            self.evict(excess + min(ahead, _TXN_PAGES, capacity // 16))

    def evict(self, pages: int) -> int:
        """Evict records until ``pages`` are free or none is left; return the pages freed."""
        freed = 0
        while freed < pages:
            step = self._evict_some(pages - freed)
            if not step:
                break
            freed += step
        return freed

    def evict_for_now(self, pages: int) -> None:
        """Evict, and let one more transaction pass, so that the very next one can use the pages."""
        if self.evict(pages):
            notes.tick(self._environment)

    def _evict_some(self, pages: int) -> int:
        """Evict in one transaction, then report the names."""
        trees = self._environment.trees
        freed = 0
        names: list[bytes] = []
        with self._environment.env.begin(write=True) as txn, txn.cursor(db=trees.recency) as oldest:
            kinship = Kinship(self._environment, txn)
            while freed < min(pages, _TXN_PAGES) and len(names) < _TXN_RECORDS and oldest.first():
                name = bytes(oldest.value())
                entry = remove(self._environment, txn, name, kinship)
                if entry is None:
                    oldest.delete()  # a line without a record
                    continue
                freed += self.pages(entry.nbytes)
                names.append(name)
            kinship.settle()
        if names:
            self._environment.report_removed(names)
        return freed


def remove(environment: Environment, txn: Transaction, name: bytes, kinship: Kinship) -> Entry | None:
    """Delete a record with its lines in the other trees; None when it is not there."""
    trees = environment.trees
    found = txn.get(name, db=trees.index)
    if found is None:
        return None
    entry = Entry.parse(found)
    txn.delete(sequence_key(entry.sequence), db=trees.recency)
    txn.delete(name, db=trees.index)
    txn.delete(name, db=trees.records)
    kinship.removed(name, entry)
    return entry

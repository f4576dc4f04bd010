"""Room on the medium: what is live, what is evicted, and how far the file may grow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from kvstore_lmdb.entry import Entry, sequence_key
from kvstore_lmdb.environment import Environment
from kvstore_lmdb.notes import stored_capacity

Transaction = Any  # lmdb.Transaction is generic in the stubs only

EVICT_AT: Final = 0.98  # of the capacity: tree pages of the next transaction fit in the rest
FILE_FACTOR: Final = 1.25  # longest file per capacity; variable sizes need about a fifth of free pages
FILE_EXTRA_BYTES: Final = 1 << 20  # 1 MiB, for trees and lists of free pages
_SPARE_PAGES: Final = 64  # of FILE_EXTRA_BYTES, kept for transactions that store no record
_TXN_RECORDS: Final = 64  # records evicted in one transaction
_TXN_PAGES: Final = 1024  # pages freed in one transaction: liblmdb stores their list, 8 bytes each, as one value
_AHEAD: Final = 0.005  # of the capacity, evicted beyond need so that not every put pays a transaction
_READER_WAIT_S: Final = 0.06  # our own readers renew within 50 ms
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
        self._fallback_bytes: Final = capacity_bytes
        self._opened_pages: Final = environment.opened.opened_bytes // environment.page_bytes
        self._stuck_at: int | None = None  # transaction in which the file grew although room was free
        self._waited = False

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

    def limits(self, txn: Transaction) -> Limits:
        """Bounds for the capacity that the store holds now; another process may have changed it."""
        capacity_bytes = stored_capacity(self._environment, txn) or self._fallback_bytes
        longest = int(capacity_bytes * FILE_FACTOR) + FILE_EXTRA_BYTES
        file = max(longest // self._page_bytes - _SPARE_PAGES, self._opened_pages)
        return Limits(capacity_bytes // self._page_bytes, file)

    def fits(self, nbytes: int, limits: Limits) -> bool:
        """Whether a record can be stored at all."""
        return self.pages(nbytes) <= int(limits.capacity * EVICT_AT) - 8

    def make_room(self, pages: int) -> None:
        """Evict, oldest use first, until ``pages`` more stay below the threshold."""
        with self._environment.env.begin() as txn:
            live, limits = self.live_pages(txn), self.limits(txn)
        excess = live + pages - int(limits.capacity * EVICT_AT)
        if excess > 0:
            self.evict(excess + min(int(limits.capacity * _AHEAD), _TXN_PAGES))

    def evict(self, pages: int) -> int:
        """Evict records until ``pages`` are free or none is left; return the pages freed."""
        freed = 0
        while freed < pages:
            step = self._evict_some(pages - freed)
            if not step:
                break
            freed += step
        return freed

    def _evict_some(self, pages: int) -> int:
        """Evict in one transaction, then report the names."""
        trees = self._environment.trees
        freed = 0
        names: list[bytes] = []
        with self._environment.env.begin(write=True) as txn, txn.cursor(db=trees.recency) as oldest:
            while freed < min(pages, _TXN_PAGES) and len(names) < _TXN_RECORDS and oldest.first():
                name = bytes(oldest.value())
                entry = remove(self._environment, txn, name)
                if entry is None:
                    oldest.delete()  # a line without a record
                    continue
                freed += self.pages(entry.nbytes)
                names.append(name)
        if names:
            self._environment.report_removed(names)
        return freed

    def tight(self, pages: int, limits: Limits) -> bool:
        """Whether storing ``pages`` could make the file too long if no free run fits."""
        return self.last_page() + 2 * pages > limits.file

    def admit_tight(self, pages: int, limits: Limits) -> bool:
        """Prepare to store one record near the file's bound; False to refuse it.

        The file must not grow, so the record has to fit into free pages: keep more of them free
        the nearer the bound is, and give up while an old reader keeps them from being reused.
        """
        if self._reader_in_the_way():
            return False
        last = self.last_page()
        share = 0.9 if last + pages <= limits.file else 0.6 if last <= limits.file else 0.3
        with self._environment.env.begin() as txn:
            live = self.live_pages(txn)
        excess = live + pages - int(limits.file / FILE_FACTOR * share)
        if excess > 0:
            self.evict(excess)
        return True

    def watch_growth(self, before: int) -> None:
        """Note after a commit near the bound whether the file grew all the same."""
        info = self._environment.env.info()
        if info["last_pgno"] > before:
            self._stuck_at, self._waited = info["last_txnid"], False

    def last_page(self) -> int:
        """Highest page in use, as of the last commit."""
        return int(self._environment.env.info()["last_pgno"])

    def _reader_in_the_way(self) -> bool:
        if self._stuck_at is None:
            return False
        end = time.monotonic() + (0.0 if self._waited else _READER_WAIT_S)
        while (oldest := oldest_reader(self._environment.env.readers())) is not None and oldest < self._stuck_at:
            if time.monotonic() >= end:
                self._waited = True
                return True
            time.sleep(0.005)
        self._stuck_at = None
        return False


def remove(environment: Environment, txn: Transaction, name: bytes) -> Entry | None:
    """Delete a record with its lines in the other trees; None when it is not there."""
    trees = environment.trees
    found = txn.get(name, db=trees.index)
    if found is None:
        return None
    entry = Entry.parse(found)
    txn.delete(sequence_key(entry.sequence), db=trees.recency)
    txn.delete(name, db=trees.index)
    txn.delete(name, db=trees.records)
    return entry


def oldest_reader(table: str) -> int | None:
    """Return the oldest transaction id in the text of ``Environment.readers``; None without readers."""
    ids = [int(fields[2]) for line in table.splitlines() if len(fields := line.split()) == 3 and fields[2].isdigit()]
    return min(ids, default=None)

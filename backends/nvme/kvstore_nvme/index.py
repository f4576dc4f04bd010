"""The index: which record lies where, and what each region is good for.

Four named trees in one LMDB environment; everything here runs inside a caller's transaction.

* ``names``: stored name -> :class:`Entry`
* ``slots``: region and first page -> stored name, so that a region can be emptied
* ``regions``: region -> :class:`Row`
* ``notes``: capacity, clock, epochs, unfinished drops
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import lmdb

from kvstore.backend import RecordInfo
from kvstore_nvme.slot import PAGE_BYTES, Slot

Transaction = Any  # lmdb.Transaction is generic in the stubs only

NAMES, SLOTS, REGIONS, NOTES = b"nvme-names", b"nvme-slots", b"nvme-regions", b"nvme-notes"
TREES: Final = (NAMES, SLOTS, REGIONS, NOTES)

FREE, OPEN, SEALED, UNSCANNED = 0, 1, 2, 3
"""State of a region: no records; partly filled; full; records on disk that the index does not know."""

_ENTRY: Final = struct.Struct(">IIQIIHhQI")
_PLACE: Final = struct.Struct(">IIQ")  # what an entry starts with
_ROW: Final = struct.Struct(">BQIIIIQ")
_SLOT_KEY: Final = struct.Struct(">II")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_CAPACITY, _INDEX, _CLOCK = b"capacity", b"index", b"clock"
_EPOCH, _DROP = b"epoch:", b"drop:"


@dataclass(frozen=True, slots=True)
class Trees:
    """Handles of the named trees."""

    names: lmdb._Database
    slots: lmdb._Database
    regions: lmdb._Database
    notes: lmdb._Database


class Entry(NamedTuple):
    """Where a record lies; a tuple, because every lookup makes one.

    Attributes:
        region: Region.
        page: First page of the slot in it.
        sequence: The slot's.
        nbytes: Length of the record.
        head_bytes: Length of its head.
        front_bytes: Record bytes in the slot's first page.
        codec_id: Codec of the record, -1 unknown.
        parent_tag: The slot's.
        used: Unix seconds of the last use since it was written here; 0 for none.
    """

    region: int
    page: int
    sequence: int
    nbytes: int
    head_bytes: int
    front_bytes: int
    codec_id: int
    parent_tag: int
    used: int = 0

    @classmethod
    def of(cls, slot: Slot, region: int, page: int) -> Entry:
        """Describe a slot at its place."""
        return cls(
            *(region, page, slot.sequence, slot.nbytes, slot.head_bytes, slot.front_bytes),
            *(slot.codec_id, slot.parent_tag),
        )

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Entry:
        """Read what :meth:`pack` wrote."""
        return cls._make(_ENTRY.unpack(data))

    def pack(self) -> bytes:
        """Return the value for the tree."""
        return _ENTRY.pack(*self)

    @property
    def offset(self) -> int:
        """Byte offset of the slot in its region."""
        return self.page * PAGE_BYTES

    @property
    def pages(self) -> int:
        """Pages of the slot."""
        return 1 + -(-(self.nbytes - self.front_bytes) // PAGE_BYTES)

    def same_slot(self, other: Entry | None) -> bool:
        """Whether both mean the same bytes on disk."""
        return other is not None and self[:3] == other[:3]

    def info(self, name: bytes) -> RecordInfo:
        """Return the public description."""
        last_use = max(self.sequence / 1e6, float(self.used))
        return RecordInfo(name, self.head_bytes, self.nbytes - self.head_bytes, self.codec_id, last_use)


class Row(NamedTuple):
    """What is known about a region.

    Attributes:
        state: ``FREE``, ``OPEN``, ``SEALED`` or ``UNSCANNED``.
        generation: Number of its present use; slots carry it.
        written_pages: Pages from the start that may hold records.
        records: Live records.
        pages: Their pages.
        hits: Uses since it was last looked at for eviction.
        turn: Place in the order of eviction, smaller first.
    """

    state: int
    generation: int = 0
    written_pages: int = 0
    records: int = 0
    pages: int = 0
    hits: int = 0
    turn: int = 0

    def pack(self) -> bytes:
        """Return the value for the tree."""
        return _ROW.pack(*self._replace(hits=min(self.hits, (1 << 32) - 1)))


class Index:
    """The trees of one environment; methods take the transaction to work in."""

    def __init__(self, trees: Trees) -> None:
        self.trees: Final = trees

    def find(self, txn: Transaction, name: bytes) -> Entry | None:
        """Return where a record lies."""
        try:
            found = txn.get(name, db=self.trees.names)
        except lmdb.BadValsizeError:
            return None  # no such name can be stored
        return None if found is None else Entry.parse(found)

    def has(self, txn: Transaction, name: bytes) -> bool:
        """Whether a record is stored."""
        return txn.get(name, db=self.trees.names) is not None

    def still(self, txn: Transaction, name: bytes, entry: Entry) -> bool:
        """Whether a record still lies where ``entry`` says."""
        found = txn.get(name, db=self.trees.names)
        return found is not None and found[: _PLACE.size] == _PLACE.pack(entry.region, entry.page, entry.sequence)

    def add(self, txn: Transaction, name: bytes, entry: Entry) -> None:
        """Enter a record; the caller keeps the region's row."""
        txn.put(name, entry.pack(), db=self.trees.names)
        txn.put(_SLOT_KEY.pack(entry.region, entry.page), name, db=self.trees.slots)

    def remove(self, txn: Transaction, name: bytes) -> Entry | None:
        """Take a record out and out of its region's row; None when it is not there."""
        entry = self.find(txn, name)
        if entry is None:
            return None
        txn.delete(name, db=self.trees.names)
        txn.delete(_SLOT_KEY.pack(entry.region, entry.page), db=self.trees.slots)
        row = self.row(txn, entry.region)
        if row is not None and row.records:
            left = row._replace(records=row.records - 1, pages=max(0, row.pages - entry.pages))
            self.set_row(txn, entry.region, left)
        return entry

    def empty_slots(self, txn: Transaction, region: int, most: int) -> tuple[list[bytes], bool]:
        """Remove up to ``most`` records of a region; return their names and whether that was all."""
        gone: list[bytes] = []
        gone_pages = 0
        slots = self.in_region(txn, region, most)
        for page, name in slots:
            txn.delete(_SLOT_KEY.pack(region, page), db=self.trees.slots)
            entry = self.find(txn, name)
            if entry is not None and entry.region == region and entry.page == page:
                txn.delete(name, db=self.trees.names)
                gone.append(name)
                gone_pages += entry.pages
        row = self.row(txn, region)
        if row is not None and gone:
            left = row._replace(records=max(0, row.records - len(gone)), pages=max(0, row.pages - gone_pages))
            self.set_row(txn, region, left)
        return gone, len(slots) < most

    def touch(self, txn: Transaction, name: bytes, now: int) -> bool:
        """Note a use of a record and of its region; False when it is not there."""
        entry = self.find(txn, name)
        if entry is None:
            return False
        txn.put(name, entry._replace(used=now).pack(), db=self.trees.names)
        row = self.row(txn, entry.region)
        if row is not None:
            self.set_row(txn, entry.region, row._replace(hits=row.hits + 1))
        return True

    def in_region(self, txn: Transaction, region: int, most: int) -> list[tuple[int, bytes]]:
        """Return first page and name of up to ``most`` records of a region."""
        found: list[tuple[int, bytes]] = []
        with txn.cursor(db=self.trees.slots) as cursor:
            more = cursor.set_range(_SLOT_KEY.pack(region, 0))
            while more and len(found) < most:
                holder, page = _SLOT_KEY.unpack(cursor.key())
                if holder != region:
                    break
                found.append((page, bytes(cursor.value())))
                more = cursor.next()
        return found

    def listed(self, txn: Transaction, after: bytes, most: int) -> list[tuple[bytes, Entry]]:
        """Return up to ``most`` records whose names follow ``after``."""
        found: list[tuple[bytes, Entry]] = []
        with txn.cursor(db=self.trees.names) as cursor:
            more = cursor.set_range(after) if after else cursor.first()
            if more and bytes(cursor.key()) == after:
                more = cursor.next()
            while more and len(found) < most:
                found.append((bytes(cursor.key()), Entry.parse(cursor.value())))
                more = cursor.next()
        return found

    def row(self, txn: Transaction, region: int) -> Row | None:
        """Return what is known about a region; None when it has no space yet."""
        found = txn.get(_U32.pack(region), db=self.trees.regions)
        return None if found is None else Row._make(_ROW.unpack(found))

    def set_row(self, txn: Transaction, region: int, row: Row | None) -> None:
        """Replace or, with None, remove a region's row."""
        if row is None:
            txn.delete(_U32.pack(region), db=self.trees.regions)
        else:
            txn.put(_U32.pack(region), row.pack(), db=self.trees.regions)

    def rows(self, txn: Transaction) -> dict[int, Row]:
        """Return every region that has space."""
        with txn.cursor(db=self.trees.regions) as cursor:
            return {_U32.unpack(key)[0]: Row._make(_ROW.unpack(value)) for key, value in cursor.iternext()}

    def live_pages(self, txn: Transaction) -> int:
        """Return the pages of the index in use."""
        trees = (self.trees.names, self.trees.slots, self.trees.regions, self.trees.notes)
        stats = [txn.stat(tree) for tree in trees]
        return 3 + sum(int(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    def records(self, txn: Transaction) -> int:
        """Return the number of records."""
        return int(txn.stat(self.trees.names)["entries"])

    def budget(self, txn: Transaction) -> tuple[int, int] | None:
        """Return capacity and index bytes that the last opener set; None in a new index."""
        found = [txn.get(key, db=self.trees.notes) for key in (_CAPACITY, _INDEX)]
        return None if None in found else (_U64.unpack(found[0])[0], _U64.unpack(found[1])[0])

    def set_budget(self, txn: Transaction, capacity_bytes: int, index_bytes: int) -> None:
        """Set capacity and index bytes for every process."""
        txn.put(_CAPACITY, _U64.pack(capacity_bytes), db=self.trees.notes)
        txn.put(_INDEX, _U64.pack(index_bytes), db=self.trees.notes)

    def tick(self, txn: Transaction, at_least: int) -> int:
        """Return a number larger than all before it and at least ``at_least``."""
        found = txn.get(_CLOCK, db=self.trees.notes)
        now = max(at_least, _U64.unpack(found)[0] + 1 if found is not None else 0)
        txn.put(_CLOCK, _U64.pack(now), db=self.trees.notes)
        return now

    def epoch(self, txn: Transaction, namespace: bytes) -> bytes | None:
        """Return a namespace's epoch."""
        found = txn.get(_EPOCH + namespace, db=self.trees.notes)
        return None if found is None else bytes(found)

    def set_epoch(self, txn: Transaction, namespace: bytes, epoch: bytes) -> None:
        """Set a namespace's epoch."""
        txn.put(_EPOCH + namespace, epoch, db=self.trees.notes)

    def request_drop(self, txn: Transaction, prefix: bytes) -> None:
        """Remember that records of a prefix are to be reclaimed."""
        txn.put(_DROP + prefix, b"", db=self.trees.notes)

    def next_drop(self, txn: Transaction) -> bytes | None:
        """Return a prefix that is not yet reclaimed."""
        with txn.cursor(db=self.trees.notes) as cursor:
            if cursor.set_range(_DROP) and bytes(cursor.key()).startswith(_DROP):
                return bytes(cursor.key())[len(_DROP) :]
        return None

    def under(self, txn: Transaction, prefix: bytes, most: int) -> Iterator[bytes]:
        """Return up to ``most`` names that start with a prefix."""
        with txn.cursor(db=self.trees.names) as cursor:
            more = cursor.set_range(prefix) if prefix else cursor.first()
            while more and most and bytes(cursor.key()).startswith(prefix):
                yield bytes(cursor.key())
                most -= 1
                more = cursor.next()

    def finish_drop(self, txn: Transaction, prefix: bytes) -> None:
        """Forget a prefix of which nothing is left."""
        txn.delete(_DROP + prefix, db=self.trees.notes)

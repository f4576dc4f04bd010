"""Puts: room in the region in use, one vectored write a run of records, then one index transaction."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import lmdb

from kvstore.backend import PutHint, PutItem
from kvstore.types import Call, PutStatus
from kvstore_nvme.buffers import Staging, cut_front, plan
from kvstore_nvme.errors import Failure, is_full, put_status
from kvstore_nvme.index import Entry
from kvstore_nvme.locks import Locks
from kvstore_nvme.regions import Claim, Regions
from kvstore_nvme.slot import MAX_NAME_BYTES, PAGE_BYTES, Slot
from kvstore_nvme.store import Store
from kvstore_nvme.syncing import GroupSync
from kvstore_nvme.touches import Touches

_EXTENT_BYTES: Final = 8 << 20  # written between two looks at the clock, published together
_WRITE_BYTES: Final = 2 << 20  # small records are joined into writes of this size; larger ones gain nothing
_WRITE_VECTORS: Final = 768  # the system takes 1,024
_HOT_S: Final = 60.0  # nobody waits for less: 32 MiB at most
_PUBLISH_ATTEMPTS: Final = 3
_TOUCHES_WITH_PUT: Final = 64
_ZEROS: Final = memoryview(bytes(PAGE_BYTES))


@dataclass(slots=True)
class _Record:
    """One record of a put: its index in the call, its slot and the pages of that, its first page."""

    i: int
    item: PutItem
    slot: Slot
    pages: int
    page: int = 0


@dataclass(slots=True)
class _Extent:
    """Neighbouring records with room in one region."""

    claim: Claim
    records: list[_Record] = field(default_factory=list)

    def add(self, record: _Record, sequence: int) -> None:
        """Give a record the next room in the region."""
        claim = self.claim
        record.slot.generation, record.slot.sequence = claim.generation, sequence
        record.page = claim.next_page
        claim.next_page += record.pages
        self.records.append(record)


class Writer:
    """Appends records for every backend of this process on one store; thread-safe."""

    def __init__(self, store: Store, locks: Locks) -> None:
        self.store: Final = store
        self.regions: Final = Regions(store, locks)
        self.touches: Final = Touches(store)
        self.turn: Final = threading.Condition(threading.Lock())
        self._sync: Final = GroupSync(store.segments.sync)
        self._claim: Claim | None = None
        self._retiring = 0
        self._sequence = 0
        store.at_close(self.leave)

    def put_many(
        self, items: Sequence[PutItem], call: Call, *, durable: bool
    ) -> tuple[list[PutStatus], Exception | None]:
        """Store records; return one status per item, and the error that stopped some if any."""
        statuses = [PutStatus.TOO_LARGE] * len(items)
        error: Exception | None = None
        waiting = self._new_ones(items, statuses)
        for record in waiting:
            statuses[record.i] = PutStatus.TIMEOUT
        while waiting and not call.stop():
            try:
                extent = self._reserve(waiting, call)
            except Failure as e:
                error = e
                for record in waiting:
                    statuses[record.i] = put_status(e)
                break
            if extent is None:
                break
            waiting = waiting[len(extent.records) :]
            failed = self._store_extent(extent, statuses, call, durable=durable)
            error = failed or error
        self._settle_repeats(items, statuses)
        return statuses, error

    def leave(self) -> None:
        """Give up the region in use, so that any process may go on with it."""
        with self.turn:
            claim, self._claim = self._claim, None
            if claim is not None and not claim.writing:
                self.regions.leave(claim)

    def maintain(self, until: float) -> None:
        """Bring regions in line with their files and the capacity, until about a monotonic time."""
        self.store.segments.forget_replaced()
        due = self.regions.due()
        if due:
            with self.turn:
                if self._claim is not None and due.concerns(self._claim.region):
                    self._retire()
                self.regions.settle(due, until)

    def _retire(self) -> None:
        """Give no more room in the region in use; runs in our turn."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.full = True
            self._retiring += 1
            self._seal_if_done(claim)

    def _new_ones(self, items: Sequence[PutItem], statuses: list[PutStatus]) -> list[_Record]:
        """Return the records to write; those stored already are settled and count as used."""
        index, limit = self.store.index, self.store.geometry.region_pages
        new: dict[bytes, _Record] = {}
        known: list[bytes] = []
        with self.store.reading() as txn:
            for i, item in enumerate(items):
                if not 1 <= len(item.name) <= MAX_NAME_BYTES or item.name in new:
                    continue
                if index.has(txn, item.name):
                    statuses[i] = PutStatus.EXISTS
                    known.append(item.name)
                    continue
                slot = Slot.of(item)
                pages = slot.pages
                if pages <= limit:
                    new[item.name] = _Record(i, item, slot, pages)
        self.touches.note(known)
        return list(new.values())

    @staticmethod
    def _settle_repeats(items: Sequence[PutItem], statuses: list[PutStatus]) -> None:
        """Give later items of a name that came twice the fate of the first."""
        first: dict[bytes, PutStatus] = {}
        for i, item in enumerate(items):
            seen = first.setdefault(item.name, statuses[i])
            if statuses[i] is PutStatus.TOO_LARGE and seen is not PutStatus.TOO_LARGE:
                statuses[i] = PutStatus.EXISTS if seen is PutStatus.STORED else seen

    def _reserve(self, waiting: Sequence[_Record], call: Call) -> _Extent | None:
        """Give room to as many leading records as fit; None when the call's time is up."""
        limit = self.store.geometry.region_pages
        if not self.turn.acquire(timeout=call.remaining()):
            return None
        try:
            claim = self._claim
            pages = waiting[0].pages
            if claim is None or claim.next_page + pages > limit:
                claim = self._next_claim(pages, call)
            extent = _Extent(claim)
            taken = 0
            for record in waiting:
                pages = record.pages
                if claim.next_page + pages > limit or (taken and taken + pages * PAGE_BYTES > _EXTENT_BYTES):
                    break
                extent.add(record, self._next_sequence())
                taken += pages * PAGE_BYTES
            claim.writing += 1
            return extent
        finally:
            self.turn.release()

    def _next_claim(self, pages: int, call: Call) -> Claim:
        """Retire the region in use and take another one; runs in our turn."""
        self._retire()
        claim: Claim | None = None
        while claim is None:
            try:
                claim = self.regions.claim(pages)
            except OSError as e:
                # In a small store the only region left may be the one that others still write to.
                if e.errno != errno.ENOSPC or not self._retiring or not self.turn.wait(call.remaining()):
                    raise
        self._claim = claim
        if claim.hot:
            self._append_hot(claim)
        return claim

    def _append_hot(self, claim: Claim) -> None:
        """Write the used records of the region's past life to its start."""
        extent = _Extent(claim)
        for name, entry, data in claim.hot:
            item = PutItem(name, [data], PutHint(), entry.head_bytes)
            slot = replace(Slot.of(item), parent_tag=entry.parent_tag)
            extent.add(_Record(len(extent.records), item, slot, slot.pages), self._next_sequence())
        claim.hot = []
        names = [record.item.name for record in extent.records]
        statuses = [PutStatus.TIMEOUT] * len(names)
        self._write(extent, statuses, Call.within(_HOT_S))
        try:
            self._publish(extent, statuses)
        except Failure:
            statuses = [PutStatus.UNAVAILABLE] * len(names)
        lost = [name for name, status in zip(names, statuses, strict=True) if status is not PutStatus.STORED]
        if lost:
            self.store.report_removed(lost)

    def _store_extent(
        self, extent: _Extent, statuses: list[PutStatus], call: Call, *, durable: bool
    ) -> Exception | None:
        """Write, sync if asked to, publish; return what went wrong."""
        try:
            error = self._write(extent, statuses, call)
            try:
                if durable and any(statuses[r.i] is PutStatus.STORED for r in extent.records):
                    self._sync.run(extent.claim.region)
                self._publish_with_room(extent, statuses)
            except Failure as e:
                error = e
                for record in extent.records:
                    if statuses[record.i] is PutStatus.STORED:
                        statuses[record.i] = put_status(e)
            return error
        finally:
            with self.turn:
                extent.claim.writing -= 1
                self._seal_if_done(extent.claim)

    def _write(self, extent: _Extent, statuses: list[PutStatus], call: Call) -> Exception | None:
        """Write run by run; records that are on disk get ``STORED``."""
        rest = extent.records
        while rest and not call.stop():
            with self.store.staging() as staging:
                vectors, count = self._vectors(rest, staging)
                try:
                    self.store.segments.write(extent.claim.region, rest[0].page * PAGE_BYTES, vectors)
                except OSError as e:
                    for record in rest:
                        statuses[record.i] = put_status(e)
                    return e
            for record in rest[:count]:
                statuses[record.i] = PutStatus.STORED
            rest = rest[count:]
        return None

    def _vectors(self, records: Sequence[_Record], staging: Staging) -> tuple[list[memoryview], int]:
        """Lay out the leading records that make one write; return the gather list and their number."""
        align = self.store.segments.align
        vectors: list[memoryview] = []
        count = nbytes = 0
        for record in records:
            slot, slot_bytes = record.slot, record.pages * PAGE_BYTES
            if count and (nbytes + slot_bytes > _WRITE_BYTES or len(vectors) > _WRITE_VECTORS):
                break
            page = staging.take(PAGE_BYTES)
            front, body = cut_front(record.item.buffers, slot.front_bytes)
            slot.pack_into(page)
            at = PAGE_BYTES - slot.front_bytes
            for view in front:
                page[at : at + view.nbytes] = view
                at += view.nbytes
            parts = plan(body, align, staging)
            parts.fill()
            padding = slot_bytes - PAGE_BYTES - parts.nbytes
            vectors += [page, *parts.vectors, *([_ZEROS[:padding]] if padding else [])]
            nbytes += slot_bytes
            count += 1
        return vectors, count

    def _publish_with_room(self, extent: _Extent, statuses: list[PutStatus]) -> None:
        """Enter the records; a full index is answered by emptying a region."""
        for attempt in range(_PUBLISH_ATTEMPTS):
            try:
                self._publish(extent, statuses)
            except lmdb.Error as e:
                if not is_full(e) or attempt + 1 == _PUBLISH_ATTEMPTS:
                    raise
            else:
                return
            with self.turn:
                self.regions.relieve()

    def _publish(self, extent: _Extent, statuses: list[PutStatus]) -> None:
        """Enter what was written, in one transaction; another process may have been first."""
        index, claim = self.store.index, extent.claim
        results: dict[int, PutStatus] = {}
        with self.store.writing() as txn:
            row = index.row(txn, claim.region)
            if row is None or row.generation != claim.generation:
                raise OSError(errno.ESTALE, f"region {claim.region} was taken away")
            records, pages, written = row.records, row.pages, row.written_pages
            for record in extent.records:
                if statuses[record.i] is not PutStatus.STORED:
                    continue
                slot = record.slot
                written = max(written, record.page + record.pages)
                if index.has(txn, slot.name):
                    results[record.i] = PutStatus.EXISTS
                    continue
                index.add(txn, slot.name, Entry.of(slot, claim.region, record.page))
                records, pages = records + 1, pages + record.pages
            index.set_row(txn, claim.region, row._replace(records=records, pages=pages, written_pages=written))
            self.touches.write(txn, _TOUCHES_WITH_PUT)
        for i, status in results.items():
            statuses[i] = status

    def _seal_if_done(self, claim: Claim) -> None:
        """Seal a full region when its last write has ended; runs in our turn."""
        if claim.full and not claim.writing:
            self._retiring -= 1
            try:
                self.regions.seal(claim)
            finally:
                self.turn.notify_all()

    def _next_sequence(self) -> int:
        """Microseconds now, or one more than the last: always larger, whatever the clock does."""
        self._sequence = max(self._sequence + 1, time.time_ns() // 1000)
        return self._sequence

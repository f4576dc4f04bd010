"""Which region this process appends to, and which one is emptied for it.

A region is free, open (partly filled), sealed (full) or not scanned yet.  Whoever changes a region
holds its byte lock, so a region whose owner died can be taken over by anyone.  Sealed regions are
emptied in the order of a clock: a region that was used is passed over once for each halving of its
hits, and the used records of the region that is emptied are handed back to be appended again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore_nvme.geometry import count_regions
from kvstore_nvme.index import FREE, OPEN, SEALED, UNSCANNED, Entry, Row
from kvstore_nvme.locks import Locks
from kvstore_nvme.scanning import scan_region
from kvstore_nvme.slot import PAGE_BYTES
from kvstore_nvme.store import Store

_PORTION: Final = 128  # records removed in one transaction, so that a nearly full index can take it
_HOT_SHARE: Final = 4  # a quarter of a region at most is kept
_HOT_BYTES: Final = 32 << 20  # ... and no more than this is held in memory meanwhile
_YOUNG_SHARE: Final = 2  # the newer half of the regions is emptied last: a put may be as large as a third of a store
_INDEX_SHARE: Final = 0.45  # of the index that may be live: copy-on-write needs as much again


@dataclass(slots=True)
class Claim:
    """A region that this process appends to.

    Attributes:
        region: Its number.
        generation: Its present use.
        next_page: First page not yet given out.
        written_pages: Pages that hold published slots.
        writing: Writes that have room and are not yet published.
        full: Nothing is given out any more; it is sealed when ``writing`` gets to zero.
        hot: Records of the region's past life to be appended again, with their bytes.
    """

    region: int
    generation: int
    next_page: int = 0
    written_pages: int = 0
    writing: int = 0
    full: bool = False
    hot: list[tuple[bytes, Entry, bytes]] = field(default_factory=list)


class _Emptied(NamedTuple):
    """The new generation of a region, and the used records that were in it."""

    generation: int
    hot: list[tuple[bytes, Entry, bytes]]


@dataclass(frozen=True, slots=True)
class Due:
    """Work on regions that nobody asked for.

    Attributes:
        unscanned: Regions whose records the index does not know.
        beyond: Regions beyond what the capacity allows, last first.
        lost: Regions whose file was removed or cut by somebody else.
        cut_at: How many regions the files need to hold.
        too_long: Whether a file holds more.
    """

    unscanned: list[int]
    beyond: list[int]
    lost: list[int]
    cut_at: int
    too_long: bool

    def concerns(self, region: int) -> bool:
        """Whether a region in use must be given up first."""
        return region in self.beyond or region in self.lost

    def __bool__(self) -> bool:
        return bool(self.unscanned or self.beyond or self.lost or self.too_long)


class Regions:
    """Claims and empties regions; callers serialise within the process."""

    def __init__(self, store: Store, locks: Locks) -> None:
        self._store: Final = store
        self._index: Final = store.index
        self._locks: Final = locks
        self._held: set[int] = set()
        self._no_room = False

    def claim(self, pages: int) -> Claim:
        """Take a region with room for ``pages``.

        Raises:
            OSError: ``ENOSPC`` when no region can be had.
            lmdb.Error: The index failed.
        """
        if self._crowded():
            self.relieve()
        rows, limit = self._look()
        for region in self._candidates(rows, limit, pages):
            if not self._hold(region):
                continue
            claim = None
            try:
                claim = self._prepare(region, pages)
            finally:
                if claim is None:
                    self._release(region)
            if claim is not None:
                return claim
        raise OSError(errno.ENOSPC, "no region can be freed: the disk is full or other processes use all of them")

    def seal(self, claim: Claim) -> None:
        """Give up a region that is full."""
        with self._store.writing() as txn:
            row = self._index.row(txn, claim.region)
            if row is not None:
                turn = self._index.tick(txn, time.time_ns() // 1000)
                self._index.set_row(txn, claim.region, row._replace(state=SEALED, turn=turn))
        self._release(claim.region)

    def leave(self, claim: Claim) -> None:
        """Give up a region that has room left; any process may go on with it."""
        self._release(claim.region)

    def due(self) -> Due:
        """Look for work: one pass over the rows and one look at each file; needs nobody's turn."""
        rows, limit = self._look()
        lengths = self._store.segments.lengths()
        has = self._store.geometry.within
        return Due(
            unscanned=[r for r, row in rows.items() if row.state == UNSCANNED],
            beyond=sorted((r for r in rows if r >= limit), reverse=True),
            lost=[r for r in rows if not has(r, lengths)],
            cut_at=max([limit, *(r + 1 for r in rows)]),
            too_long=any(has(r, lengths) for r in self._ends(lengths) if r >= limit and r not in rows),
        )

    def settle(self, due: Due, until: float) -> None:
        """Do what is due; regions that other processes use are left for another time.

        Args:
            due: What :meth:`due` found.
            until: Monotonic time after which no further region is scanned.
        """
        for region in due.unscanned:
            self._on(region, lambda r: scan_region(self._store, r))
            if time.monotonic() >= until:
                break
        for region in due.beyond:
            if not self._on(region, self._cut_off):
                break
        for region in due.lost:
            self._on(region, self._empty)
        if due.too_long and not due.beyond:
            self._store.segments.cut(due.cut_at)

    def _cut_off(self, region: int) -> None:
        self._empty(region)
        self._store.segments.cut(region)

    def _on(self, region: int, work: Callable[[int], object]) -> bool:
        """Work on a region while holding it; False when somebody else does."""
        if not self._hold(region):
            return False
        try:
            work(region)
        finally:
            self._release(region)
        return True

    def _ends(self, lengths: Mapping[int, int]) -> Iterator[int]:
        """The last whole region of each segment file."""
        for number, nbytes in lengths.items():
            regions = nbytes // self._store.geometry.region_bytes
            if regions:
                yield number * self._store.geometry.segment_regions + regions - 1

    def _look(self) -> tuple[dict[int, Row], int]:
        """Return all rows and how many regions there may be."""
        data = self._store.opened.guarded.data
        with self._store.reading() as txn:
            rows, budget = self._index.rows(txn), self._index.budget(txn)
        if budget is None:
            return rows, 0
        capacity, index_bytes = budget
        return rows, count_regions(self._store.geometry, capacity, max(index_bytes, data.stat().st_size))

    def _candidates(self, rows: dict[int, Row], limit: int, pages: int) -> Iterator[int]:
        """Regions to try, best first: open ones with room, free, new, unknown, then the clock's choice."""
        total = self._store.geometry.region_pages
        yield from (r for r, w in rows.items() if w.state == OPEN and r < limit and w.written_pages + pages <= total)
        yield from (r for r, w in rows.items() if r < limit and (w.state == FREE or not w.records) and w.state < 3)
        self._no_room = False
        for region in range(limit):
            if self._no_room:
                break
            if region not in rows:
                yield region
        yield from self._clock(rows, limit)
        yield from (r for r, w in rows.items() if w.state == UNSCANNED and r < limit)

    def _clock(self, rows: dict[int, Row], limit: int) -> Iterator[int]:
        """Sealed regions, and open ones that are nearly full, in the order in which to empty them."""
        full = sorted((w.generation, r) for r, w in rows.items() if w.state in {SEALED, OPEN} and r < limit)
        # nobody has had the time to read what was written last, so that its lack of hits says nothing
        young = [r for _, r in full[-max(1, len(full) // _YOUNG_SHARE) :]]
        waiting = sorted((rows[r].turn, r) for _, r in full if r not in young)
        used = [(rows[r].hits, turn, r) for turn, r in waiting if rows[r].hits]
        passed: list[int] = []
        for _, region in waiting:
            if rows[region].hits:
                passed.append(region)
                continue
            self._pass_over(passed)
            passed.clear()
            yield region
        for _, _, region in sorted(used):
            yield region
        yield from young

    def _pass_over(self, regions: Sequence[int]) -> None:
        """Send used regions to the end of the order, with half of their hits."""
        if not regions:
            return
        with self._store.writing() as txn:
            for region in regions:
                row = self._index.row(txn, region)
                if row is not None:
                    turn = self._index.tick(txn, time.time_ns() // 1000)
                    self._index.set_row(txn, region, row._replace(hits=row.hits // 2, turn=turn))

    def _prepare(self, region: int, pages: int) -> Claim | None:
        """Make a region that we hold ready to append; None when it is of no use after all."""
        with self._store.reading() as txn:
            row = self._index.row(txn, region)
        if row is None:
            return self._start_new(region)
        if row.state == UNSCANNED:
            scan_region(self._store, region)
            return None
        if not self._store.segments.allocated(region):
            self._empty(region)
            return self._start_new(region)
        if row.state == OPEN and row.written_pages + pages <= self._store.geometry.region_pages:
            return Claim(region, row.generation, row.written_pages, row.written_pages)
        emptied = self._empty(region, keep_hot=row.hits > 0, then=Row(OPEN))
        return Claim(region, emptied.generation, hot=emptied.hot)

    def _start_new(self, region: int) -> Claim | None:
        try:
            self._store.segments.allocate(region)
        except OSError as e:
            if e.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise
            self._no_room = True  # asked again at the next claim: a refusal costs microseconds
            return None
        emptied = self._empty(region, then=Row(OPEN))
        return Claim(region, emptied.generation)

    def _empty(self, region: int, *, keep_hot: bool = False, then: Row | None = None) -> _Emptied:
        """Remove a region's records from the index, in small transactions; report what is gone.

        Args:
            region: A region that we hold.
            keep_hot: Read its used records first.
            then: Its row afterwards, with a generation and a turn of its own; None removes it.
        """
        hot = self._read_hot(region) if keep_hot else []
        kept = {name for name, _, _ in hot}
        generation, over = 0, False
        while not over:
            with self._store.writing() as txn:
                gone, over = self._index.empty_slots(txn, region, _PORTION)
                if over:
                    generation = self._index.tick(txn, time.time_ns() // 1000)
                    row = None if then is None else then._replace(generation=generation, turn=generation)
                    self._index.set_row(txn, region, row)
            gone = [name for name in gone if name not in kept] if kept else gone
            if gone:
                self._store.report_removed(gone)
        return _Emptied(generation, hot)

    def _read_hot(self, region: int) -> list[tuple[bytes, Entry, bytes]]:
        """Read the most recently used records of a region that is about to be emptied."""
        with self._store.reading() as txn:
            slots = self._index.in_region(txn, region, 1 << 30)
            found = [(name, self._index.find(txn, name)) for _, name in slots]
        used = [(name, e) for name, e in found if e is not None and e.used and e.region == region]
        used.sort(key=lambda pair: pair[1].used, reverse=True)
        room = min(self._store.geometry.region_bytes // _HOT_SHARE, _HOT_BYTES)
        hot: list[tuple[bytes, Entry, bytes]] = []
        for name, entry in used:
            room -= entry.pages * PAGE_BYTES
            if room < 0:
                break
            with self._store.staging() as staging:
                view = staging.take(entry.pages * PAGE_BYTES)
                if self._store.segments.read(region, entry.offset, [view]) == view.nbytes:
                    start = PAGE_BYTES - entry.front_bytes
                    hot.append((name, entry, bytes(view[start : start + entry.nbytes])))
        return hot

    def _crowded(self) -> bool:
        """Whether the index is about to get larger than it may."""
        with self._store.reading() as txn:
            budget, live = self._index.budget(txn), self._index.live_pages(txn)
        return budget is not None and live * PAGE_BYTES > budget[1] * _INDEX_SHARE

    def relieve(self) -> None:
        """Make the index smaller by emptying one region."""
        rows, limit = self._look()
        for region in self._clock(rows, limit):
            if rows[region].records and self._on(region, lambda r: self._empty(r, then=Row(FREE))):
                return

    def _hold(self, region: int) -> bool:
        if region in self._held or not self._locks.take(region):
            return False
        self._held.add(region)
        return True

    def _release(self, region: int) -> None:
        self._held.discard(region)
        self._locks.give(region)

"""Finding the records of a region from their slot headers, when the index is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore_nvme.index import FREE, OPEN, UNSCANNED, Entry, Row
from kvstore_nvme.slot import PAGE_BYTES, SLOT_MAGIC, Slot
from kvstore_nvme.store import Store

_CHUNK_PAGES: Final = 256  # 1 MiB at a time where no slot follows the last one
_PORTION: Final = 256  # records entered in one transaction


def scan_region(store: Store, region: int) -> None:
    """Enter the records of an ``UNSCANNED`` region that the caller holds.

    Raises:
        OSError, lmdb.Error: The medium failed; the region stays as it is.
    """
    with store.reading() as txn:
        row = store.index.row(txn, region)
    if row is None or row.state != UNSCANNED:
        return
    found = _slots(store, region)
    generation = max((slot.generation for _, slot in found), default=0)
    found = [(page, slot) for page, slot in found if slot.generation == generation]
    for start in range(0, len(found), _PORTION):
        _enter(store, region, found[start : start + _PORTION])
    with store.writing() as txn:
        row = store.index.row(txn, region)
        if row is None:
            return
        if not found:
            store.index.set_row(txn, region, Row(FREE))
            return
        store.index.tick(txn, max(generation, *(slot.sequence for _, slot in found)))
        last, slot = found[-1]
        row = row._replace(state=OPEN, generation=generation, written_pages=last + slot.pages, turn=generation)
        store.index.set_row(txn, region, row)


def _enter(store: Store, region: int, found: Sequence[tuple[int, Slot]]) -> None:
    """Enter some slots; of two with one name the later one stays."""
    index = store.index
    with store.writing() as txn:
        for page, slot in found:
            entry, known = Entry.of(slot, region, page), index.find(txn, slot.name)
            if known is not None and known.sequence >= entry.sequence:
                continue
            if known is not None:
                index.remove(txn, slot.name)
            index.add(txn, slot.name, entry)
            row = index.row(txn, region)
            if row is not None:
                index.set_row(txn, region, row._replace(records=row.records + 1, pages=row.pages + entry.pages))


def _slots(store: Store, region: int) -> list[tuple[int, Slot]]:
    """Return the slots with sound headers, each after the end of the one before."""
    total = store.geometry.region_pages
    found: list[tuple[int, Slot]] = []
    page = 0
    while page < total:
        with store.staging() as staging:
            view = staging.take(PAGE_BYTES)
            if store.segments.read(region, page * PAGE_BYTES, [view]) < PAGE_BYTES:
                break
            slot = Slot.parse(view)
        if slot is None:
            page = _next_slot(store, region, page + 1)
        elif page + slot.pages > total:
            page += 1
        else:
            found.append((page, slot))
            page += slot.pages
    return found


def _next_slot(store: Store, region: int, page: int) -> int:
    """Return the next page that looks like a slot's first, or the region's end."""
    total = store.geometry.region_pages
    while page < total:
        pages = min(_CHUNK_PAGES, total - page)
        with store.staging() as staging:
            chunk = staging.take(pages * PAGE_BYTES)
            got = store.segments.read(region, page * PAGE_BYTES, [chunk])
            for at in range(0, got // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES):
                if bytes(chunk[at : at + 4]) == SLOT_MAGIC:
                    return page + at // PAGE_BYTES
        if got < pages * PAGE_BYTES:
            break
        page += pages
    return total

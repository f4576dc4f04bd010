"""Deleting, discarding, reclaiming: changes that need no room."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from kvstore.types import Call
from kvstore_nvme.index import Entry
from kvstore_nvme.slot import PAGE_BYTES
from kvstore_nvme.store import Store

_PORTION: Final = 64  # records in one transaction, so that a nearly full index can take it
_HEADER_BYTES: Final = 192
_CHECKSUM_AT: Final = 184


def delete_many(store: Store, names: Sequence[bytes], call: Call) -> int:
    """Delete records in small transactions; return how many were there."""
    count = 0
    for start in range(0, len(names), _PORTION):
        if call.stop():
            break
        with store.writing() as txn:
            for name in names[start : start + _PORTION]:
                entry = store.index.remove(txn, name)
                if entry is not None:
                    _wipe(store, entry)
                    count += 1
    return count


def forget(store: Store, name: bytes, entry: Entry) -> None:
    """Drop an entry that leads to something else than the record, unless it has changed meanwhile."""
    with store.writing() as txn:
        if entry.same_slot(store.index.find(txn, name)):
            store.index.remove(txn, name)


def discard(store: Store, name: bytes, header_checksum: int) -> None:
    """Drop a record whose bytes 184..192 still hold ``header_checksum``; a shorter one anyway."""
    with store.reading() as txn:
        entry = store.index.find(txn, name)
    if entry is None:
        return
    if entry.nbytes >= _HEADER_BYTES:
        at = PAGE_BYTES - entry.front_bytes + _CHECKSUM_AT
        with store.staging() as staging:
            view = staging.take(min(2, entry.pages) * PAGE_BYTES)
            store.segments.read(entry.region, entry.offset, [view])
            if int.from_bytes(view[at : at + 8], "little") != header_checksum:
                return
    with store.writing() as txn:
        if entry.same_slot(store.index.find(txn, name)):
            store.index.remove(txn, name)
            _wipe(store, entry)


def reclaim(store: Store) -> bool:
    """Remove one portion of the records under a dropped prefix; False when nothing is pending."""
    with store.reading() as txn:
        prefix = store.index.next_drop(txn)
    if prefix is None:
        return False
    with store.writing() as txn:
        names = list(store.index.under(txn, prefix, _PORTION))
        for name in names:
            store.index.remove(txn, name)
        if not names:
            store.index.finish_drop(txn, prefix)
    return True


def _wipe(store: Store, entry: Entry) -> None:
    """Overwrite a slot's header, so that a new index does not bring the record back.

    Runs inside the write transaction that removed the entry: nobody can have reused its pages.
    What cannot be overwritten stays deleted as long as the index lives.
    """
    with store.staging() as staging, contextlib.suppress(OSError):
        page = staging.take(PAGE_BYTES)
        page[:] = bytes(PAGE_BYTES)
        store.segments.write(entry.region, entry.offset, [page])

"""Reading a part of a record: the pages that hold it, and the slot's first page to be sure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backend import Receive
from kvstore.types import Call, ReadStatus
from kvstore_nvme.errors import Failure, read_status
from kvstore_nvme.slot import PAGE_BYTES, is_slot_of
from kvstore_nvme.store import Store

_NEAR_BYTES: Final = 64 << 10  # a range that starts nearer to the first page is read together with it


def get_ranges(
    store: Store, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
) -> tuple[list[ReadStatus], Exception | None]:
    """Hand over the ranges; return the statuses and the last error, if any."""
    statuses = [ReadStatus.UNAVAILABLE] * len(names)
    error: Exception | None = None
    for i, name in enumerate(names):
        if call.stop():
            statuses[i:] = [ReadStatus.SKIPPED if call.cancelled else ReadStatus.TIMEOUT] * (len(names) - i)
            return statuses, error
        try:
            found = _read_range(store, name, ranges[i], lambda view, i=i: receive(i, view))  # type: ignore[misc]
            statuses[i] = ReadStatus.OK if found else ReadStatus.ABSENT
        except Failure as e:
            error = e
            statuses[i] = read_status(e)
        if statuses[i] is not ReadStatus.OK and call.leading_only:
            statuses[i + 1 :] = [ReadStatus.SKIPPED] * (len(names) - i - 1)
            return statuses, error
    return statuses, error


def _read_range(store: Store, name: bytes, wanted: tuple[int, int], hand_over: Callable[[memoryview], None]) -> bool:
    """Hand over a range of one record; False when it is not (or no longer) there."""
    with store.reading() as txn:
        entry = store.index.find(txn, name)
    if entry is None:
        return False
    start = min(max(wanted[0], 0), entry.nbytes)
    stop = min(max(wanted[1], start), entry.nbytes)
    base = PAGE_BYTES - entry.front_bytes  # where the record begins in its slot
    first, last = (base + start) // PAGE_BYTES, -(-(base + stop) // PAGE_BYTES)
    if first * PAGE_BYTES <= _NEAR_BYTES:
        first = 0
    with store.staging() as staging:
        view = staging.take(max(1, last - first) * PAGE_BYTES)
        got = store.segments.read(entry.region, entry.offset + first * PAGE_BYTES, [view])
        page = view
        if first:
            page = staging.take(PAGE_BYTES)
            store.segments.read(entry.region, entry.offset, [page])
        with store.reading() as txn:
            same = store.index.still(txn, name, entry)
        at = base + start - first * PAGE_BYTES
        agrees = is_slot_of(page, name, entry.sequence, (entry.nbytes, entry.front_bytes))
        if not same or got < at + stop - start or not agrees:
            return False
        hand_over(view[at : at + stop - start].toreadonly())
    return True

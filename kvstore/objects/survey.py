"""Looking at everything on a medium: how much there is, and what is oldest."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.objects.medium import ObjectInfo, ObjectMedium
from kvstore.objects.naming import holds_records
from kvstore.types import Call

CANDIDATES: Final = 4096
"""Oldest objects kept of one listing: about 1 MB, and a listing pays for that many evictions."""

_LISTING_S: Final = 600.0  # a bucket of 10 million objects takes 10,000 requests


class Candidate(NamedTuple):
    """An object that may be evicted, oldest first."""

    modified: float
    key: str
    nbytes: int
    blocks: int


@dataclass(slots=True)
class Surveyed:
    """What a listing found.

    Attributes:
        records: Records in all objects; an object whose count the medium does not tell counts as one.
        nbytes: Charged bytes of all objects that hold records.
        notes_bytes: Charged bytes of everything else.
        oldest: The oldest objects, as a heap.
        horizon: Unix time; objects that are not among ``oldest`` are not older than this.  Infinite
            when all are.
        seconds: What the listing took.
    """

    records: int
    nbytes: int
    notes_bytes: int
    oldest: list[Candidate]
    horizon: float
    seconds: float


def listing_call() -> Call:
    """Limits of one listing of everything."""
    return Call.within(_LISTING_S)


def survey(medium: ObjectMedium, charge: Callable[[int], int], seen: Callable[[ObjectInfo, int], int]) -> Surveyed:
    """List everything once; memory is bounded whatever the medium holds.

    Args:
        medium: What to list.
        charge: Tells what an object of some length counts.
        seen: Called with every object that holds records and its charge; tells the records inside,
            0 when they are not known.

    Raises:
        BackendError: The medium failed.
    """
    started = time.monotonic()
    records = nbytes = notes_bytes = 0
    newest_first: list[tuple[float, str, int, int]] = []  # a heap of the oldest, by negated time
    horizon = math.inf
    for info in medium.entries("", listing_call()):
        charged = charge(info.nbytes)
        if not holds_records(info.key):
            notes_bytes += charged
            continue
        nbytes += charged
        blocks = seen(info, charged)
        records += max(1, blocks)
        item = (-info.modified, info.key, charged, blocks)
        if len(newest_first) < CANDIDATES:
            heapq.heappush(newest_first, item)
        else:
            horizon = min(horizon, -heapq.heappushpop(newest_first, item)[0])
    oldest = [Candidate(-age, key, charged, blocks) for age, key, charged, blocks in newest_first]
    heapq.heapify(oldest)
    return Surveyed(records, nbytes, notes_bytes, oldest, horizon, time.monotonic() - started)


def round_up(nbytes: int, multiple: int) -> int:
    """Bytes an object is charged with."""
    return math.ceil(nbytes / multiple) * multiple

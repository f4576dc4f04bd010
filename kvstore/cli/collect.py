"""Choosing and deleting old records of any backend that can list them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.backend import Backend, RecordInfo

_BATCH_RECORDS: Final = 256  # a transaction or a bulk request each; short enough to be interrupted between
_BATCH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What may stay.

    Attributes:
        max_age_s: Records last used longer ago go; None keeps every age.
        max_bytes: The oldest records go until the rest takes no more than this; None for no bound.
    """

    max_age_s: float | None = None
    max_bytes: int | None = None


@dataclass(slots=True)
class Selection:
    """What a store holds, and what of it is to go."""

    records: int = 0
    nbytes: int = 0
    victims: list[bytes] = field(default_factory=list)
    victim_bytes: int = 0


def select(backend: Backend, limits: Limits, advance: Callable[[int], None], *, now: float | None = None) -> Selection:
    """List a store and choose the records beyond the limits, oldest use first.

    Where a medium knows no time of last use, the time of writing in the record's head stands in,
    and of records written in one second those go first that stand last in their sequence.

    Raises:
        NotSupportedError: The backend cannot list its records.
        BackendError: The medium failed.
    """
    infos = []
    for info in backend.scan():
        infos.append(info)
        advance(1)
    ranked = sorted(_ranked(backend, infos), key=lambda item: item[0])
    now = time.time() if now is None else now
    found = Selection(len(infos), sum(info.nbytes for info in infos))
    for (used, _), info in ranked:
        too_old = limits.max_age_s is not None and now - used > limits.max_age_s
        too_many = limits.max_bytes is not None and found.nbytes - found.victim_bytes > limits.max_bytes
        if not (too_old or too_many):
            break
        found.victims.append(info.name)
        found.victim_bytes += info.nbytes
    return found


def _ranked(backend: Backend, infos: Sequence[RecordInfo]) -> Iterable[tuple[tuple[float, int], RecordInfo]]:
    """Pair each record with its time and, where heads had to be read, its negative place in the sequence."""
    unknown = [info for info in infos if not info.last_use]
    heads = _heads(backend, unknown)
    for info in infos:
        yield (heads.get(info.name, (time.time(), 0)) if not info.last_use else (info.last_use, 0)), info


def _heads(backend: Backend, infos: Sequence[RecordInfo]) -> dict[bytes, tuple[float, int]]:
    """Read (time of writing, negative block index) from the heads of records; what is unreadable is left out."""
    from kvstore.errors import CorruptRecordError
    from kvstore.record import HEADER_BYTES, unpack_head

    found: dict[bytes, tuple[float, int]] = {}
    for start in range(0, len(infos), _BATCH_RECORDS):
        names = [info.name for info in infos[start : start + _BATCH_RECORDS]]

        def receive(i: int, view: memoryview, names: Sequence[bytes] = names) -> None:
            try:
                head = unpack_head(view)
            except CorruptRecordError:
                return
            found[names[i]] = (float(head.created), -head.block_index)

        backend.get_ranges(names, [(0, HEADER_BYTES)] * len(names), receive, Call.within(_BATCH_S))
    return found


def delete(backend: Backend, names: Sequence[bytes], advance: Callable[[int], None]) -> int:
    """Delete records in batches; returns how many were still there.

    Raises:
        BackendError: The medium failed.
    """
    deleted = 0
    for start in range(0, len(names), _BATCH_RECORDS):
        batch = names[start : start + _BATCH_RECORDS]
        deleted += backend.delete_many(batch, Call.within(_BATCH_S))
        advance(len(batch))
    return deleted

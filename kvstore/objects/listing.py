"""Listing records, and collecting old ones on demand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_128_intdigest

from kvstore.backend import RecordInfo
from kvstore.errors import BackendError
from kvstore.objects.medium import ObjectInfo
from kvstore.objects.naming import holds_records, key_of
from kvstore.objects.pack import Entry, PackError
from kvstore.objects.remembered import StoredObject
from kvstore.objects.store import ObjectStore
from kvstore.objects.survey import Candidate, listing_call

_TOGETHER: Final = 64  # indexes read at once
_TOLD_ONCE: Final = 1_000_000  # names remembered so that overlapping packs are told once; 60 MB at most


def scan(store: ObjectStore) -> Iterator[RecordInfo]:
    """List each stored record once; reads the index of every object, so it is for tools, not for a hot path."""
    told: set[int] = set()
    objects = (info for info in store.medium.entries("", listing_call()) if holds_records(info.key))
    while batch := list(itertools.islice(objects, _TOGETHER)):
        for info, entries in zip(batch, _indexes(store, batch), strict=True):
            _note(store, info, entries)
            for entry in entries:
                mark = xxh3_128_intdigest(entry.name)
                if mark not in told:
                    if len(told) < _TOLD_ONCE:
                        told.add(mark)
                    yield entry.info(entry.name, info.modified)


def _note(store: ObjectStore, info: ObjectInfo, entries: list[Entry]) -> None:
    """Remember where the names lie: whoever lists them reads or removes them next, by name alone."""
    if entries and key_of(entries[-1].name) == info.key:
        listed = StoredObject(entries[-1].name, len(entries), info.nbytes, info.modified)
        store.remembered.note_listed(listed, [entry.name for entry in entries])


def _indexes(store: ObjectStore, batch: list[ObjectInfo]) -> list[list[Entry]]:
    found: list[list[Entry]] = [[] for _ in batch]
    failed: list[BackendError] = []

    def read(k: int) -> None:
        try:
            found[k] = store.index(batch[k].key, batch[k].nbytes, listing_call()) or []
        except PackError:
            return  # no record, so not listed
        except BackendError as e:
            failed.append(e)

    store.fanout.each(read, range(len(batch)))
    if len(failed) == len(batch):
        raise failed[0]
    return found


def collect(store: ObjectStore, max_age_s: float | None, max_bytes: int | None) -> tuple[int, int]:
    """Remove what was not used for a time, then the oldest until the rest fits; returns records and bytes."""
    records = nbytes = 0
    evictor = store.space.evictor
    if max_age_s is not None:
        before = time.time() - max_age_s
        old = (i for i in store.medium.entries("", listing_call()) if holds_records(i.key) and i.modified < before)
        while batch := list(itertools.islice(old, _TOGETHER)):
            victims = [Candidate(i.modified, i.key, store.space.charge(i.nbytes), i.blocks) for i in batch]
            records += sum(max(1, victim.blocks) for victim in victims)
            nbytes += evictor.discard(victims, store.call())
    if max_bytes is not None:
        found = store.space.look()
        left = found.nbytes
        while left > max_bytes and found.oldest:
            victims = sorted(found.oldest)
            fitting = list(itertools.accumulate(v.nbytes for v in victims))
            enough = next((k + 1 for k, freed in enumerate(fitting) if left - freed <= max_bytes), len(victims))
            for k in range(0, enough, _TOGETHER):
                step = victims[k : min(k + _TOGETHER, enough)]
                records += sum(max(1, victim.blocks) for victim in step)
                nbytes += evictor.discard(step, store.call())
            found = store.space.look()
            left = found.nbytes
    return records, nbytes

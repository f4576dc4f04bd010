"""Blocks on their way in: L1 first, then the write queue of every tier that takes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.backend import PutHint
from kvstore.l1.reservation import Reservation
from kvstore.l2.writer import Write
from kvstore.record import RecordMeta
from kvstore.types import Presence

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.l2.tier import Tier
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Rows


def parent_of(key: KVCacheKey, i: int) -> bytes | None:
    """Digest of the block before block ``i`` of a key, None for a first or unknown one."""
    return key.digests[i - 1] if i else key.parent


def lineage(key: KVCacheKey, indices: Sequence[int]) -> list[tuple[bytes, bytes | None]]:
    """(digest, parent) of some blocks of a key, as L1 wants them."""
    digests = key.digests
    return [(digests[i], parent_of(key, i)) for i in indices]


class Writes:
    """The write half of a cache; thread-safe."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def put(self, key: KVCacheKey, rows: Rows) -> int:
        """Snapshot blocks and queue them; returns how many leading ones were accepted."""
        if not len(key):
            return 0
        l1 = self._stack.l1
        accepted = self._put_l1(l1, key, rows) if l1 is not None else self._put_staged(key, rows)
        self._stack.counters.add(puts=accepted, put_refused=len(key) - accepted)
        return accepted

    def _put_l1(self, l1: L1Cache, key: KVCacheKey, rows: Rows) -> int:
        resident = l1.pin_each(key.digests)
        missing = [i for i, entry in enumerate(resident) if entry is None]
        held = [entry for entry in resident if entry is not None]
        slots: list[int] = []
        try:
            slots = l1.reserve(len(missing)) if missing else []
            for slot, i in zip(slots, missing, strict=False):
                rows.copy_to(i, l1.pool.payload(slot))
        except BaseException:
            l1.release_slots(slots)
            l1.unpin(held)
            raise
        accepted = len(key) if len(slots) == len(missing) else missing[len(slots)]
        fresh = l1.publish(lineage(key, missing[: len(slots)]), slots, pins=1)
        entries = self._in_order(resident, missing, fresh)[:accepted]
        l1.touch([e.digest for e in resident[:accepted] if e is not None])
        try:
            self.enqueue(key, entries)
        finally:
            l1.unpin(held + fresh)
        return accepted

    @staticmethod
    def _in_order(resident: Sequence[Entry | None], missing: Sequence[int], fresh: Sequence[Entry]) -> list[Entry]:
        merged = list(resident)
        for i, entry in zip(missing, fresh, strict=False):
            merged[i] = entry
        return [entry for entry in merged if entry is not None]

    def enqueue(self, key: KVCacheKey, entries: Sequence[Entry]) -> None:
        """Queue pinned L1 entries, the leading blocks of ``key``, for every tier that takes and lacks them."""
        self._enqueue(key, list(enumerate(entries)), self._used_before(key.digests[: len(entries)]))

    def reused(self, key: KVCacheKey, indices: Sequence[int]) -> None:
        """Blocks were delivered from L1: tiers that take hot blocks may take them now."""
        l1 = self._stack.l1
        if l1 is None or not self._has_hot_tiers():
            return
        digests = [key.digests[i] for i in indices]
        resident = l1.pin_each(digests)
        held = [(i, entry) for i, entry in zip(indices, resident, strict=True) if entry is not None]
        try:
            self._enqueue(key, held, self._used_before(digests), hot_only=True)
        finally:
            l1.unpin([entry for _, entry in held])

    def _has_hot_tiers(self) -> bool:
        return any(open_tier.hot_only for open_tier in self._stack)

    def _used_before(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these had a use before this one, which is noted."""
        if not self._has_hot_tiers():
            return set()
        before = self._stack.put_once.among(digests)
        self._stack.put_once.note(digests)
        return before

    def _enqueue(
        self, key: KVCacheKey, held: Sequence[tuple[int, Entry]], used_before: set[bytes], *, hot_only: bool = False
    ) -> None:
        for open_tier in self._stack:
            wanted = held
            if open_tier.hot_only:
                wanted = [(i, entry) for i, entry in held if entry.digest in used_before]
            elif hot_only:
                continue
            todo = self._lacking(open_tier.tier, key, wanted)
            if todo:
                self._queue_entries(open_tier, key, todo)

    def _lacking(self, tier: Tier, key: KVCacheKey, held: Sequence[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
        """Entries that the tier neither holds nor is about to get; a known one is refreshed."""
        bit = tier.bit
        with self._stack.marks:
            todo = [(i, e) for i, e in held if not (e.stored | e.pending) & bit]
            known = [(i, e) for i, e in held if e.stored & bit]
        if known and tier.direct:  # asking is cheap there, and another process may have evicted some
            found = tier.presence(key.kind, [e.digest for _, e in known], tier.call())
            gone = [pair for pair, p in zip(known, found, strict=True) if p is Presence.ABSENT]
            known = [pair for pair, p in zip(known, found, strict=True) if p is Presence.PRESENT]
            todo = sorted(todo + gone, key=lambda pair: pair[0])
        tier.touch(key.kind, [e.digest for _, e in known])
        return todo

    def _queue_entries(self, open_tier: OpenTier, key: KVCacheKey, todo: Sequence[tuple[int, Entry]]) -> None:
        l1, tier = self._stack.l1, open_tier.tier
        if l1 is None:
            return
        writes = self._writes(tier, key, [(i, l1.pool.payload(e.slot).data) for i, e in todo])
        sole = len(self._stack.tiers) == 1  # otherwise two writers would fill one header page
        for write, (_, entry) in zip(writes, todo, strict=False):
            write.done = functools.partial(self._written, l1, tier.bit, entry)
            if sole:
                write.frame = l1.pool.frame(entry.slot)
        entries = [entry for _, entry in todo[: len(writes)]]
        l1.pin(entries)
        with self._stack.marks:
            for entry in entries:
                entry.pending |= tier.bit
        for write in writes[open_tier.writer.enqueue(writes) :]:
            write.release(stored=False)

    def _written(self, l1: L1Cache, bit: int, entry: Entry, stored: bool) -> None:
        with self._stack.marks:
            entry.pending &= ~bit
            if stored:
                entry.stored |= bit
        l1.unpin([entry])

    def _writes(self, tier: Tier, key: KVCacheKey, blocks: Sequence[tuple[int, memoryview]]) -> list[Write]:
        """Describe writes of some blocks of a key; none when the tier cannot be asked for its epoch."""
        prefix = tier.prefix_for_writes(key.kind)
        if prefix is None:
            tier.counters.add(refused_medium=len(blocks))
            return []
        writes = []
        for i, raw in blocks:
            parent = parent_of(key, i)
            meta = RecordMeta(
                digest=key.digests[i],
                parent=parent,
                block_index=key.start_block + i if key.position_known else 0,
                group=key.group,
                parent_known=parent is not None or key.position_known,
            )
            position = key.start_block + i if key.position_known else -1
            hint = PutHint(parent=prefix + parent if parent else b"", position=position)
            writes.append(Write(meta, prefix + key.digests[i], hint, raw, _nothing))
        return writes

    def _put_staged(self, key: KVCacheKey, rows: Rows) -> int:
        """Without L1 the snapshot lives in the queue itself, so its byte bound limits the copies."""
        nbytes = self._stack.identity.spec.nbytes
        used_before = self._used_before(key.digests)
        for i in range(len(key)):
            staging = np.empty(nbytes, np.uint8)
            rows.copy_to(i, staging)
            raw = staging.data
            cold = key.digests[i] not in used_before
            taken = 0
            for open_tier in self._stack:
                if open_tier.hot_only and cold:
                    taken += 1  # nothing to store yet is no refusal
                    continue
                taken += open_tier.writer.enqueue(self._writes(open_tier.tier, key, [(i, raw)]))
            if not taken:
                return i
        return len(key)

    def reserve(self, key: KVCacheKey, l1: L1Cache) -> Reservation:
        """Writable L1 slots for a key's blocks; committing publishes and queues them."""
        slots = l1.reserve(len(key))
        items = lineage(key, range(len(slots)))

        def committed(entries: list[Entry]) -> None:
            self._stack.counters.add(puts=len(entries))
            self.enqueue(key, entries)

        return Reservation(l1, items, slots, on_commit=committed)

    def delete(self, key: KVCacheKey) -> int:
        """Delete blocks from every tier; returns how many distinct ones were there."""
        digests = key.digests
        found: set[bytes] = set()
        if self._stack.l1 is not None:
            here = self._stack.l1.contains(digests)
            found.update(d for d, there in zip(digests, here, strict=True) if there)
            self._stack.l1.delete(digests)
        self._stack.seen.forget(digests)
        for open_tier in self._stack:
            tier = open_tier.tier
            open_tier.writer.cancel(frozenset(digests), tier.settings.deadline_s)
            presence = tier.presence(key.kind, digests, tier.call())
            stored = [d for d, p in zip(digests, presence, strict=True) if p is not Presence.ABSENT]
            if stored and tier.delete(key.kind, stored):
                found.update(d for d, p in zip(digests, presence, strict=True) if p is Presence.PRESENT)
        self._stack.counters.add(deleted=len(found))
        return len(found)

    def clear(self) -> None:
        """Empty every tier at once by a new epoch."""
        for open_tier in self._stack:
            open_tier.writer.cancel(None, 0.0)
            open_tier.tier.clear()
        if self._stack.l1 is not None:
            self._stack.l1.clear()
        self._stack.forget()
        self._stack.counters.add(clears=1)


def _nothing(stored: bool) -> None:
    """Staged bytes belong to the write itself; nothing to release."""

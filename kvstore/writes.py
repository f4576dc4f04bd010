"""Blocks on their way in: L1 first, then the write queue of every tier that takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.delivery import snapshot
from kvstore.history import Event, Note
from kvstore.l1.reservation import Reservation
from kvstore.l2.part import Part
from kvstore.l2.write_queue import Request
from kvstore.queueing import Held, end_request, lineage, placed, staged
from kvstore.seen import FreshChains
from kvstore.types import Presence
from kvstore.uses import Uses

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.served import Served
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Rows

__all__ = ["Writes", "lineage"]


class Writes:
    """The write half of a cache; thread-safe."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._uses = Uses(stack)
        self._fresh = FreshChains()

    def put(self, key: KVCacheKey, rows: Rows) -> int:
        """Snapshot blocks and queue them; returns how many leading ones were accepted."""
        if not len(key):
            return 0
        l1 = self._stack.l1
        accepted = self._put_l1(l1, key, rows) if l1 is not None else self._put_staged(key, rows)
        self._stack.counters.add(puts=accepted, put_refused=len(key) - accepted)
        if accepted < len(key):
            self._note_refused(key.digests[accepted:])
        return accepted

    def _note_refused(self, digests: Sequence[bytes]) -> None:
        """Remember why a put ended early: no slots in L1, or without L1 what befell its first refused block."""
        stack = self._stack
        if stack.l1 is not None:
            stack.l1_history.note(digests, Event.REFUSED, "full")
            stack.l1.evicted_lately(digests, forget=True)
        for open_tier in stack:
            history = open_tier.tier.history
            first = history.of(digests[:1])[0] if stack.l1 is None else Note(Event.REFUSED, 0.0, "L1 was full")
            if first is not None:
                history.note(digests, first.event, first.detail)

    def _put_l1(self, l1: L1Cache, key: KVCacheKey, rows: Rows) -> int:
        resident = l1.pin_each(key.digests)
        missing = [i for i, entry in enumerate(resident) if entry is None]
        held = [entry for entry in resident if entry is not None]
        slots: list[int] = []
        try:
            slots = l1.reserve(len(missing)) if missing else []
            copies = snapshot(l1, rows, missing[: len(slots)], slots)
        except BaseException:
            l1.release_slots(slots)
            l1.unpin(held)
            raise
        accepted = len(key) if len(slots) == len(missing) else missing[len(slots)]
        fresh = l1.publish(lineage(key, missing[: len(slots)]), slots, pins=1)
        copies.publish(fresh, slots)
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
        stack = self._stack
        before = self._refreshed(key, entries)
        if not stack.tiers:
            return
        held = list(enumerate(entries))
        if stack.demotions is not None:
            stack.demotions.place(key, held)
        hot = stack.second_uses(key.digests[: len(entries)])
        for open_tier in stack:
            if open_tier.admit == "all":
                self._offer(open_tier, key, held, before)
            elif open_tier.admit == "hot" and hot:
                self._offer(open_tier, key, [(i, entry) for i, entry in held if entry.digest in hot], before)

    def _refreshed(self, key: KVCacheKey, entries: Sequence[Entry]) -> Sequence[bytes]:
        """Blocks before a key's first one that a put of it uses too, if it is time to say so; told to L1."""
        l1 = self._stack.l1
        if l1 is None or not entries or not self._fresh.due(key.parent, entries[-1].digest) or key.parent is None:
            return ()
        before = l1.ancestors(key.parent)
        l1.touch(before)
        return before

    def _offer(self, open_tier: OpenTier, key: KVCacheKey, held: Held, before: Sequence[bytes]) -> None:
        """Queue what the tier lacks of pinned blocks of a key and note a use of what it holds."""
        queueing = self._stack.queueing
        todo, known, coming = queueing.lacking(open_tier.tier, key, held)
        # now, so that the new ones evict others
        open_tier.tier.touch(key.kind, [*before, *(e.digest for _, e in held if e.digest in known)])
        if not todo:
            return
        request = Request(key.kind)
        taken = queueing.entries(open_tier, placed(key, todo), request)
        end_request(open_tier, request, set(taken), known.union(coming, before), [*before, *key.digests])

    def _put_staged(self, key: KVCacheKey, rows: Rows) -> int:
        """Without L1 the snapshot lives in the queue itself, so its byte bound limits the copies."""
        nbytes = self._stack.identity.spec.nbytes
        hot = self._stack.second_uses(key.digests)
        requests = [(t, Request(key.kind), set[bytes]()) for t in self._stack]
        accepted = 0
        try:
            for accepted in range(len(key)):
                staging = np.empty(nbytes, np.uint8)
                rows.copy_to(accepted, staging)
                if not self._stage(requests, key, accepted, staging.data, hot):
                    return accepted
            accepted = len(key)
        finally:
            for open_tier, request, taken in requests:
                end_request(open_tier, request, taken, (), key.digests)
        return accepted

    def _stage(
        self,
        requests: Iterable[tuple[OpenTier, Request, set[bytes]]],
        key: KVCacheKey,
        i: int,
        raw: memoryview,
        hot: set[bytes],
    ) -> int:
        """Queue one block for every tier; returns how many took it or had no wish for it."""
        digest, done = key.digests[i], 0
        for open_tier, request, taken in requests:
            if open_tier.admit == "hot" and digest not in hot:
                done += 1  # nothing to store yet is no refusal
                continue
            prefix = open_tier.tier.prefix_for_writes(key.kind)
            if prefix is None:
                open_tier.tier.counters.add(refused_medium=1)
                open_tier.tier.history.note([digest], Event.REFUSED, "unavailable")
            elif open_tier.writer.enqueue([staged(key, i, raw, prefix, request)]):
                taken.add(digest)
                done += 1
        return done

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
            self._stack.l1_history.note(list(found), Event.DELETED)
            self._stack.l1.evicted_lately(list(found), forget=True)  # which was an earlier story
        self._stack.seen.forget(digests)
        self._stack.settled.forget(digests)
        for open_tier in self._stack:
            tier = open_tier.tier
            open_tier.writer.cancel(frozenset(digests), tier.settings.deadline_s)
            presence = tier.presence(Part.rest(key), tier.call())
            stored = [i for i, p in enumerate(presence) if p is not Presence.ABSENT]
            if stored and tier.delete(Part(key, stored)):
                found.update(d for d, p in zip(digests, presence, strict=True) if p is Presence.PRESENT)
        self._stack.counters.add(deleted=len(found))
        return len(found)

    def clear(self) -> None:
        """Empty every tier at once by a new epoch."""
        for open_tier in self._stack:
            open_tier.writer.cancel(None, 0.0)
            open_tier.tier.clear()
        self._stack.clear_l1("by this process")
        self._stack.forget()
        self._stack.counters.add(clears=1)

    def served(self, served: Served) -> None:
        """A read ended and delivered something, see :class:`kvstore.uses.Uses`."""
        self._uses.note(served)

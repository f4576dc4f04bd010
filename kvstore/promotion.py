"""Blocks of a tier on their way into L1 slots."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.errors import ClosedError
from kvstore.l1.pool import HEADER_BYTES
from kvstore.l2.landing import Frame, Landing
from kvstore.queueing import lineage

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.l1.index import BlockId
    from kvstore.l2.part import Part
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Bytes

_PROMOTION_STEP: Final = 16  # slots reserved at a time; a hit run may end at any block


class Promotion:
    """L1 slots for the blocks of one direct read that were read before; the rest bypass L1."""

    def __init__(self, stack: Stack, open_tier: OpenTier, key: KVCacheKey, start: int) -> None:
        self._stack = stack
        self._bit = open_tier.tier.bit
        self._key = key
        self._start = start
        self._wanted = stack.seen.among(key.digests[start:]) if stack.l1 is not None else set()
        self._generation = 0 if stack.l1 is None else stack.l1.generation
        self._spare: list[int] = []
        self._exhausted = False
        self._taken: dict[int, int] = {}

    def slot(self, i: int) -> Bytes | None:
        """Writable L1 bytes for block ``start + i``, or None when it is not to be promoted."""
        l1 = self._stack.l1
        if l1 is None or self._exhausted or self._key.digests[self._start + i] not in self._wanted:
            return None
        if not self._spare:
            wanted = min(_PROMOTION_STEP, len(self._wanted) - len(self._taken))
            self._spare = l1.reserve(wanted, at_any_cost=False)
            if not self._spare:
                self._exhausted = True
                return None
        self._taken[i] = self._spare.pop()
        return l1.pool.payload(self._taken[i])

    def publish(self, run: int) -> None:
        """Make the promoted blocks among the first ``run`` resident; give the other slots back."""
        l1 = self._stack.l1
        if l1 is None:
            return
        l1.release_slots(self._spare + [slot for i, slot in self._taken.items() if i >= run])
        good = sorted(i for i in self._taken if i < run)
        items = lineage(self._key, [self._start + i for i in good])
        placed = {i: (item, self._taken[i]) for i, item in zip(good, items, strict=True)}
        l1.unpin(publish_from_tier(self._stack, l1, self._bit, placed, self._generation).values())
        self._stack.counters.add(promoted=len(good))


class SlotLanding(Landing):
    """Lands blocks in L1 slots; those that get no slot land in staging memory.

    Slots are reserved when the first block arrives, for all of them at once and in key order: a
    read that finds nothing evicts nothing, and when slots are short the head of a key gets them.
    """

    def __init__(self, stack: Stack, open_tier: OpenTier, part: Part) -> None:
        super().__init__(open_tier.reader.frames)
        self._stack = stack
        self._bit = open_tier.tier.bit
        self._part = part
        self._generation = 0 if stack.l1 is None else stack.l1.generation
        self._lock = threading.Lock()
        self._slots: dict[int, int] | None = None

    def frame(self, i: int) -> Frame:
        """The slot of block ``i`` or a frame of staging memory, the same each time."""
        l1 = self._stack.l1
        slot = None if l1 is None else self._reserved(l1).get(i)
        if l1 is None or slot is None:
            return super().frame(i)
        return Frame(l1.pool.frame(slot), HEADER_BYTES, l1.pool.block_bytes)

    def data(self, i: int, entry: Entry | None) -> Bytes:
        """The bytes of block ``i`` after :meth:`publish` gave ``entry`` for it."""
        l1 = self._stack.l1
        if l1 is None or entry is None:
            return np.frombuffer(super().frame(i).block, np.uint8)
        return l1.pool.payload(entry.slot)

    def _reserved(self, l1: L1Cache) -> dict[int, int]:
        if self._slots is None:
            with self._lock:
                if self._slots is None:
                    self._slots = dict(enumerate(l1.reserve(len(self._part), at_any_cost=False)))
        return self._slots

    def publish(self, arrived: Sequence[int], *, keep: int) -> dict[int, Entry]:
        """Make what arrived resident and free the other slots, except those a late read still owns.

        Returns the pinned entries of the first ``keep`` blocks; where one is missing, the block
        lies in staging memory, if it arrived.
        """
        mine = [i for i in range(len(self._part)) if i not in self.abandoned]
        return self._settle(mine, frozenset(arrived), keep)

    def settle(self, share: Sequence[int], arrived: Sequence[int]) -> None:
        """A read ended after its deadline: what it brought is a hit for the next caller, if there is any."""
        with contextlib.suppress(ClosedError):
            self._settle(share, frozenset(arrived), 0)

    def _settle(self, mine: Sequence[int], arrived: frozenset[int], keep: int) -> dict[int, Entry]:
        l1, slots = self._stack.l1, self._slots
        self.release(i for i in mine if i not in arrived or i >= keep)
        if l1 is None or slots is None:
            return {}
        l1.release_slots([slots[i] for i in mine if i in slots and i not in arrived])
        good = [i for i in mine if i in slots and i in arrived]
        items = lineage(self._part.key, [self._part.indices[i] for i in good])
        placed = {i: (item, slots[i]) for i, item in zip(good, items, strict=True)}
        entries = publish_from_tier(self._stack, l1, self._bit, placed, self._generation)
        l1.unpin([entry for i, entry in entries.items() if i >= keep])
        self._stack.counters.add(promoted=len(entries))
        return {i: entry for i, entry in entries.items() if i < keep}


def publish_from_tier(
    stack: Stack, l1: L1Cache, bit: int, placed: dict[int, tuple[BlockId, int]], generation: int
) -> dict[int, Entry]:
    """Publish slots whose bytes came from a tier, so that they are never written back to it.

    Returns the entries, each with one pin, by the keys of ``placed``.
    """
    if not placed:
        return {}
    items = [item for item, _ in placed.values()]
    slots = [slot for _, slot in placed.values()]
    entries = l1.publish(items, slots, pins=1, generation=generation)
    with stack.marks:
        for entry in entries:
            entry.stored |= bit
    return dict(zip(placed, entries, strict=True))

"""Bringing blocks of a tier into L1 slots (or staging memory), pinned for whoever asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.errors import ClosedError
from kvstore.l2.reader import Landing
from kvstore.types import BlockStatus
from kvstore.writes import lineage

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.l1.index import BlockId
    from kvstore.l2.tier import Tier
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Bytes, Rows

_CHUNK_BYTES: Final = 64 << 20  # blocks in flight per round; bounds staging memory and what eviction makes room for
L1: Final = "l1"
"""L1's name among the sources of a call."""

_PROMOTION_STEP: Final = 16  # slots reserved at a time; a hit run may end at any block


@dataclass(slots=True)
class Fetched:
    """One block that a tier delivered.

    Attributes:
        data: Its bytes, in an L1 slot or in staging memory.
        entry: The pinned L1 entry, None for staging memory.
    """

    data: Bytes
    entry: Entry | None = None


class Served:
    """Which source delivered which blocks of one call."""

    def __init__(self, key: KVCacheKey) -> None:
        self.key = key
        self._asked: dict[str, Sequence[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def note(self, source: str, start: int, run: int) -> None:
        """``source`` was asked for the blocks from ``start`` on and delivered the first ``run``."""
        self._asked.setdefault(source, range(start, len(self.key)))
        self._blocks.setdefault(source, []).extend(range(start, start + run))

    def note_each(self, source: str, asked: Sequence[int], got: Sequence[int]) -> None:
        """``source`` was asked for some blocks and delivered ``got``."""
        self._asked[source] = asked
        self._blocks[source] = list(got)

    def asked_of(self, source: str) -> Sequence[int]:
        """Indices of the blocks that ``source`` was asked for."""
        return self._asked.get(source, ())

    def blocks(self, source: str) -> list[int]:
        """Indices of the blocks that ``source`` delivered, ascending."""
        return self._blocks.get(source, [])

    def every(self) -> list[int]:
        """Indices of all delivered blocks, ascending."""
        return sorted(i for blocks in self._blocks.values() for i in blocks)

    @property
    def total(self) -> int:
        """Blocks delivered."""
        return sum(len(blocks) for blocks in self._blocks.values())


class Loads:
    """Moves blocks from tiers into memory that the cache owns; thread-safe."""

    def __init__(self, stack: Stack, on_l1_hits: Callable[[KVCacheKey, Sequence[int]], None]) -> None:
        self._stack = stack
        self._on_l1_hits = on_l1_hits

    def fetch(self, open_tier: OpenTier, key: KVCacheKey, start: int, until: float) -> Iterator[list[Fetched]]:
        """Deliver the leading blocks from ``key[start]`` in chunks; each goes back by ``let_go``.

        Ends at the first block that the tier cannot deliver.  Blocks behind it that were read
        already stay in L1.
        """
        run = open_tier.tier.leading(key.kind, key.digests[start:], until)
        step = max(1, _CHUNK_BYTES // self._stack.identity.spec.nbytes)
        for first in range(start, start + run, step):
            last = min(first + step, start + run)
            fetched = self._fetch_chunk(open_tier, key, range(first, last), until)
            if fetched:
                yield fetched
            if len(fetched) < last - first:
                return

    def pin(self, key: KVCacheKey, cancelled: threading.Event | None = None) -> list[Entry]:
        """Pin the leading blocks of a key in L1, loading what the tiers have.

        Stops early, with what there is, when ``cancelled`` is set.  None without L1.
        """
        l1, n = self._stack.l1, len(key)
        entries: list[Entry] = []
        if l1 is None:
            return entries
        until = time.monotonic() + self._stack.config.defaults.deadline
        served = Served(key)
        try:
            while len(entries) < n and not (cancelled and cancelled.is_set()):
                start = len(entries)
                entries += l1.pin_leading(key.digests[start:])
                served.note(L1, start, len(entries) - start)
                for open_tier in self._stack:
                    at = len(entries)
                    if at < n and time.monotonic() < until:
                        entries += self.pin_leading(open_tier, key, at, until)
                        served.note(open_tier.tier.name, at, len(entries) - at)
                if len(entries) == start:
                    break
            self.conclude(served)
        except BaseException:
            l1.unpin(entries)
            raise
        return entries

    def pin_leading(self, open_tier: OpenTier, key: KVCacheKey, start: int, until: float) -> list[Entry]:
        """Like ``fetch``, but for callers that want L1 entries; staging memory ends the run."""
        entries: list[Entry] = []
        for fetched in self.fetch(open_tier, key, start, until):
            for k, block in enumerate(fetched):
                if block.entry is None:
                    self.let_go(fetched[k:])
                    return entries
                entries.append(block.entry)
        return entries

    def let_go(self, blocks: Sequence[Fetched]) -> None:
        """Unpin what ``fetch`` delivered."""
        if self._stack.l1 is not None:
            self._stack.l1.unpin([block.entry for block in blocks if block.entry is not None])

    def conclude(self, served: Served) -> None:
        """Count a finished call and tell L1 and each tier what it used, once and in key order.

        One call is one use: told piece by piece, a tail would come out younger than its head.
        """
        stack, key = self._stack, served.key
        n, done = len(key), served.total
        nbytes = stack.identity.spec.nbytes
        stack.counters.add(
            lookups=n, hits=done, misses=n - done, l1_hits=len(served.blocks(L1)), bytes_out=done * nbytes
        )
        digests = key.digests
        if stack.l1 is not None and done:
            stack.l1.touch([digests[i] for i in served.every()])
            if l1_hits := served.blocks(L1):
                self._on_l1_hits(key, l1_hits)
        for open_tier in stack:
            tier = open_tier.tier
            asked, got = len(served.asked_of(tier.name)), served.blocks(tier.name)
            if asked:
                tier.counters.add(lookups=asked, hits=len(got), misses=asked - len(got), bytes_out=len(got) * nbytes)
                self._emit(tier, digests, served, got)
            if got:
                used = [digests[i] for i in got]
                stack.seen.note(used)
                tier.touch(key.kind, used)

    def _emit(self, tier: Tier, digests: Sequence[bytes], served: Served, got: Sequence[int]) -> None:
        if self._stack.events.wanted:
            delivered = set(served.every())
            missed = [i for i in served.asked_of(tier.name) if i not in delivered]
            tier.emit("hit", [digests[i] for i in got])
            tier.emit("miss", [digests[i] for i in missed])

    def promotion(self, open_tier: OpenTier, key: KVCacheKey, start: int) -> Promotion:
        """Plan to keep in L1 those blocks that are read the second time."""
        return Promotion(self._stack, open_tier, key, start)

    def each(
        self, open_tier: OpenTier, key: KVCacheKey, todo: Sequence[int], rows: Rows, until: float
    ) -> list[BlockStatus]:
        """Read the blocks ``todo`` of a key, each on its own, through staging memory into their rows."""
        statuses: list[BlockStatus] = []
        nbytes = self._stack.identity.spec.nbytes
        step = max(1, _CHUNK_BYTES // nbytes)
        for first in range(0, len(todo), step):
            part = todo[first : first + step]
            staging = [np.empty(nbytes, np.uint8) for _ in part]
            landing = Landing([s.data for s in staging])
            digests = [key.digests[i] for i in part]
            answers = open_tier.reader.pooled(key.kind, digests, landing, open_tier.tier.call(until))
            for i, data, answer in zip(part, staging, answers, strict=True):
                if answer is BlockStatus.DELIVERED:
                    np.copyto(rows.target(i), data)
                    rows.commit(i)
            statuses += answers
        return statuses

    def _fetch_chunk(self, open_tier: OpenTier, key: KVCacheKey, indices: range, until: float) -> list[Fetched]:
        tier = open_tier.tier
        digests = key.digests[indices.start : indices.stop]
        landing = _SlotLanding(self._stack, tier.bit, lineage(key, indices))
        call = tier.call(until, leading_only=True)

        def sink(i: int, block: OpenBlock) -> None:
            block.write_into(landing.buffer(i))

        try:
            if tier.shares(len(indices), self._stack.identity.spec.nbytes):
                statuses = open_tier.reader.pooled(key.kind, digests, landing, call)
            else:
                statuses = open_tier.reader.direct(key.kind, digests, sink, call)
        except BaseException:  # such as KeyboardInterrupt: the reserved slots go back
            landing.publish((), keep=0)
            raise
        run = next((i for i, s in enumerate(statuses) if s is not BlockStatus.DELIVERED), len(statuses))
        arrived = [i for i, s in enumerate(statuses) if s is BlockStatus.DELIVERED]
        entries = landing.publish(arrived, keep=run)
        return [Fetched(landing.data[i], entries.get(i)) for i in range(run)]


class _SlotLanding(Landing):
    """Lands blocks in reserved L1 slots; those that get no slot land in staging memory."""

    def __init__(self, stack: Stack, bit: int, items: Sequence[BlockId]) -> None:
        self._stack = stack
        self._bit = bit
        self._items = items
        l1 = stack.l1
        self._generation = 0 if l1 is None else l1.generation
        slots = [] if l1 is None else l1.reserve(len(items), at_any_cost=False)
        self._slots: dict[int, int] = dict(enumerate(slots))
        nbytes = stack.identity.spec.nbytes
        self.data: list[Bytes] = [] if l1 is None else [l1.pool.payload(slot) for slot in slots]
        self.data += [np.empty(nbytes, np.uint8) for _ in range(len(items) - len(slots))]
        super().__init__([data.data for data in self.data])

    def publish(self, arrived: Sequence[int], *, keep: int) -> dict[int, Entry]:
        """Make what arrived resident and free the other slots, except those a late read still owns.

        Returns the pinned entries of the first ``keep`` blocks.
        """
        mine = [i for i in self._slots if i not in self.abandoned]
        return self._settle(mine, frozenset(arrived), keep)

    def settle(self, share: range, arrived: Sequence[int]) -> None:
        """A read ended after its deadline: what it brought is a hit for the next caller, if there is any."""
        with contextlib.suppress(ClosedError):
            self._settle([i for i in share if i in self._slots], frozenset(arrived), 0)

    def _settle(self, mine: Sequence[int], arrived: frozenset[int], keep: int) -> dict[int, Entry]:
        l1 = self._stack.l1
        if l1 is None:
            return {}
        l1.release_slots([self._slots[i] for i in mine if i not in arrived])
        good = [i for i in mine if i in arrived]
        entries = self._publish(l1, good)
        for i, entry in entries.items():
            self.data[i] = l1.pool.payload(entry.slot)
        l1.unpin([entry for i, entry in entries.items() if i >= keep])
        self._stack.counters.add(promoted=len(entries))
        return {i: entry for i, entry in entries.items() if i < keep}

    def _publish(self, l1: L1Cache, good: Sequence[int]) -> dict[int, Entry]:
        return publish_from_tier(
            self._stack, l1, self._bit, {i: (self._items[i], self._slots[i]) for i in good}, self._generation
        )


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

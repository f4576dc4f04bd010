"""The bookkeeping of L1: entries, pins, free slots and the policy, without any lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.errors import PluginError
from kvstore.eviction import EvictionPolicy
from kvstore.l1.entry import Entry
from kvstore.l1.holding import RELEASED, Dropped, Held, Holding
from kvstore.l1.lineage import Lineage
from kvstore.l1.pool import SlabPool

BlockId = tuple[bytes, bytes | None]
"""Digest of a block and of the block before it (None for a first block)."""


class BlockIndex:
    """Which block lies in which slot.  Not thread-safe: :class:`L1Cache` holds its lock around it.

    Every slot of the pool is in exactly one state: free, reserved by a caller, or owned by one
    entry, which is resident (in ``entries``) or dead with pins left.

    Args:
        pool: Gives and takes slots.
        policy: Knows exactly the resident blocks.

    Attributes:
        entries: Digest to resident entry.
        dropped: What finalizers and releases announced; :meth:`drain` takes it back.
        evicted: Digests of evicted blocks, if somebody wants them.
        on_evicted: Told each entry that was evicted, if somebody wants to know; must be quick.
        on_gone: Told each entry that left the index in any way and is dead, likewise.
        idle: Resident entries without pins: all that can be evicted.
        pinned: Entries with pins, dead ones included.
        evictions: Blocks evicted so far.
        leases_dropped: Holdings that ended without release.
    """

    def __init__(self, pool: SlabPool, policy: EvictionPolicy) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.lineage = Lineage(self.entries)
        self.dropped: Dropped = deque()
        self.evicted: deque[bytes] | None = None
        self.on_evicted: Callable[[Entry], None] | None = None
        self.on_gone: Callable[[Entry], None] | None = None
        self.policy = policy
        self.idle = 0
        self.pinned = 0
        self.evictions = 0
        self.leases_dropped = 0
        self._pool = pool

    def pin(self, entry: Entry, pins: int = 1) -> None:
        """Add pins; the entry is resident, or dead and pinned already.

        Raises:
            ValueError: The entry is dead and unpinned; its slot belongs to another block.
        """
        if not entry.pins:
            if entry.dead:
                msg = f"{entry!r} cannot be pinned, its slot was given back; pin it before it can leave"
                raise ValueError(msg)
            self.pinned += 1
            self.idle -= 1
        entry.pins += pins

    def unpin(self, entry: Entry) -> None:
        """Take one pin away; the last one of a dead entry frees its slot.

        Raises:
            ValueError: The entry has no pin.
        """
        if entry.pins < 1:
            msg = f"{entry!r} is unpinned more often than it was pinned; give each pin back once"
            raise ValueError(msg)
        entry.pins -= 1
        if entry.pins:
            return
        self.pinned -= 1
        if entry.dead:
            self._pool.free(entry.slot)
        else:
            self.idle += 1

    def insert(self, items: Iterable[tuple[BlockId, int]], pins: int) -> list[Entry]:
        """Make blocks resident; a block that is resident already gives its new slot back."""
        entries: list[Entry] = []
        fresh: list[bytes] = []
        for (digest, parent), slot in items:
            entry = self.entries.get(digest)
            if entry is None:
                entry = self.entries[digest] = Entry(digest, slot, parent)
                self.lineage.added(entry)
                self.idle += 1
                fresh.append(digest)
            else:
                self._pool.free(slot)
            if pins:
                self.pin(entry, pins)
            entries.append(entry)
        if fresh:
            self.policy.insert(fresh)
        return entries

    def insert_dead(self, items: Iterable[tuple[BlockId, int]], pins: int) -> list[Entry]:
        """Make entries that never become resident; without pins their slots are free again."""
        entries: list[Entry] = []
        for (digest, parent), slot in items:
            entry = Entry(digest, slot, parent)
            entry.dead = True
            entry.pins = pins
            if pins:
                self.pinned += 1
            else:
                self._pool.free(slot)
            entries.append(entry)
        return entries

    def remove(self, digest: bytes) -> bool:
        """Take a block out of the index; its slot is free now or at its last unpin."""
        entry = self.entries.pop(digest, None)
        if entry is None:
            return False
        self.lineage.removed(entry)
        self.policy.remove(digest)
        self._end(entry)
        return True

    def clear(self) -> None:
        """Take every block out of the index."""
        entries = list(self.entries.values())
        self.entries.clear()
        self.lineage.clear()
        self.policy.clear()
        for entry in entries:
            entry.children = 0
            self._end(entry)

    def take_slots(self, n_blocks: int) -> list[int]:
        """Take up to ``n_blocks`` slots, evicting where none is free; fewer when pins hold the rest."""
        slots: list[int] = []
        try:
            self._take_free(slots, n_blocks)
            while len(slots) < n_blocks:
                slot = self._evict() if self.idle else None
                if slot is not None:
                    slots.append(slot)
                elif self.dropped:  # somebody released while we looked
                    self.drain()
                    self._take_free(slots, n_blocks)
                else:
                    break
        except BaseException:
            self.free_slots(slots)
            raise
        return slots

    def free_slots(self, slots: Iterable[int]) -> None:
        """Give back reserved slots."""
        for slot in slots:
            self._pool.free(slot)

    def drain(self) -> None:
        """Take back everything that was announced in ``dropped``."""
        while self.dropped:
            holding, index = self.dropped.popleft()
            held = holding.take(index)
            self._give_back(held)
            if held and not holding.live and index != RELEASED:
                self.leases_dropped += 1

    def claim(self, holding: Holding) -> list[Held]:
        """Take everything out of a holding; empty if it was released before."""
        self.drain()
        return holding.take(RELEASED)

    def _give_back(self, held: Sequence[Held]) -> None:
        for item in held:
            if isinstance(item, Entry):
                self.unpin(item)
            else:
                self._pool.free(item)

    def _take_free(self, slots: list[int], n_blocks: int) -> None:
        while len(slots) < n_blocks:
            slot = self._pool.allocate()
            if slot is None:
                return
            slots.append(slot)

    def _evict(self) -> int | None:
        digest = self.policy.evict(self._evictable)
        if digest is None:
            return None
        entry = self.entries.get(digest)
        if entry is None or entry.pins:
            msg = f"policy {type(self.policy).__name__} evicted a block that is pinned or not resident; fix the policy"
            raise PluginError(msg)
        del self.entries[digest]
        self.lineage.removed(entry)
        entry.dead = True
        self.idle -= 1
        self.evictions += 1
        if self.evicted is not None:
            self.evicted.append(digest)
        if self.on_evicted is not None:
            self.on_evicted(entry)
        if self.on_gone is not None:
            self.on_gone(entry)
        return entry.slot

    def pin_victims(self, choose: Callable[[Iterator[Entry]], list[Entry]]) -> list[Entry]:
        """Pin what ``choose`` picks from the resident entries, which it gets in the order of eviction.

        Of a policy that lists its blocks in another order than it evicts them, the wrong ones may be
        picked.
        """
        chosen = choose(entry for entry in map(self.entries.get, self.policy) if entry is not None)
        for entry in chosen:
            self.pin(entry)
        return chosen

    def _evictable(self, digest: bytes) -> bool:
        return not self.entries[digest].pins

    def _end(self, entry: Entry) -> None:
        """Finish an entry that has just left the index, other than by eviction."""
        entry.dead = True
        if self.on_gone is not None:
            self.on_gone(entry)
        if not entry.pins:
            self.idle -= 1
            self._pool.free(entry.slot)

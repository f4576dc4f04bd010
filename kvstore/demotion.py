"""Blocks that are about to leave L1, on their way to the tiers with ``admit = "evicted"``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.history import Event
from kvstore.l2.write_queue import Request
from kvstore.queueing import placed

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.opening import OpenTier
    from kvstore.queueing import Held, Placed, Queueing

_AHEAD_SHARE: Final = 8  # of L1's slots, kept free or clean ahead of need: what a burst of puts may take at once
_WAIT_S: Final = 0.25  # what a call may wait for victims to be written; a tier that keeps up needs less
_IMPATIENT_S: Final = 5.0  # after a wait in vain nobody waits for so long: the medium hangs or is too slow
_CLOSE_STEP: Final = 32  # blocks queued at a time at close, as room comes


class _Look:
    """One look at L1's next victims, under its lock: what can go, what is to be saved first."""

    def __init__(self, needed: int, ahead: int, mask: int, rooms: dict[int, int]) -> None:
        self._needed = needed
        self._wanted = needed + ahead
        self._mask = mask
        self._rooms = rooms
        self.free_to_go = 0
        self.on_the_way: list[Entry] = []

    def __call__(self, entries: Iterator[Entry]) -> list[Entry]:
        chosen: list[Entry] = []
        for entry in entries:
            if len(self.on_the_way) + len(chosen) + self.free_to_go >= self._wanted and (
                self.free_to_go >= self._needed or any(self._rooms.values())
            ):
                break
            if entry.pins:
                if entry.pending & self._mask:
                    self.on_the_way.append(entry)
            elif self._takes(entry):
                chosen.append(entry)
            else:
                self.free_to_go += 1
        self.on_the_way += chosen
        return chosen

    def _takes(self, entry: Entry) -> bool:
        """Whether some tier lacks a block and has room in its queue, which is then spent."""
        lacking = lacking_of(entry, self._mask)
        takers = [bit for bit, room in self._rooms.items() if room > 0 and lacking & bit] if lacking else []
        for bit in takers:
            self._rooms[bit] -= 1
        return bool(takers)


def lacking_of(entry: Entry, mask: int) -> int:
    """Those tiers of ``mask`` that want a block when it leaves, and neither have it nor are about to get it."""
    return 0 if entry.place is None else mask & ~(entry.stored | entry.pending)


class Demotions:
    """Queues L1's next victims for the tiers that take evicted blocks, before they are needed; thread-safe.

    L1 calls before it takes slots.  Its next victims are then looked at, the next one first: as many
    as it needs and some ahead of need.  Those that a tier lacks are pinned and queued, and can leave
    once they are written.  So in a steady state a call finds clean victims.  One that needs more
    than were kept clean waits for the medium, for a short time and not again when that was in
    vain.  What the queue cannot take leaves unwritten and is counted.

    Args:
        l1: Whose victims.
        queueing: Hands them to the writers.
        block_bytes: Raw bytes of a block.
    """

    def __init__(self, l1: L1Cache, queueing: Queueing, block_bytes: int) -> None:
        self._l1 = l1
        self._queueing = queueing
        self._block_bytes = block_bytes
        self._tiers: Sequence[OpenTier] = ()
        self._mask = 0
        self._ahead_blocks = 0
        self._looking = threading.Lock()
        self._good_until = 0  # evictions up to which enough victims ahead were looked at
        self._no_wait_until = float("-inf")
        l1.watch_evictions(self._left)
        l1.before_eviction = self.make_room

    def use(self, tiers: Sequence[OpenTier]) -> None:
        """Take over which tiers want evicted blocks."""
        queue_blocks = max((t.tier.settings.queue_bytes // self._block_bytes for t in tiers), default=0)
        self._ahead_blocks = max(1, min(queue_blocks, self._l1.pool.n_slots // _AHEAD_SHARE))
        self._mask = sum(t.tier.bit for t in tiers)
        self._tiers = tiers

    @staticmethod
    def place(key: KVCacheKey, held: Held) -> None:
        """Note where pinned blocks of a key stand, which their records must say."""
        for place, entry in placed(key, held):
            if entry.place is None:
                entry.place = place

    def make_room(self, n_blocks: int) -> None:
        """L1 is about to take ``n_blocks`` slots: save those of its next victims that would be lost."""
        if not self._tiers:
            return
        free, evictions = self._l1.room()
        if free >= n_blocks + self._ahead_blocks:
            return
        needed = max(0, n_blocks - free)
        with self._looking:
            ahead = 0
            if evictions + n_blocks - free > self._good_until:
                ahead = self._ahead_blocks
                # half of what lies ahead may go before anybody looks that far again
                self._good_until = evictions + n_blocks - free + ahead // 2
            look = _Look(needed, ahead, self._mask, {t.tier.bit: self._room(t) for t in self._tiers})
            victims = self._l1.pin_victims(look)
        self._queue(victims)
        if look.free_to_go < needed:
            self._wait(look.on_the_way, needed - look.free_to_go)

    def _room(self, open_tier: OpenTier) -> int:
        return open_tier.writer.room_bytes // self._block_bytes

    def _wait(self, on_the_way: Sequence[Entry], blocks: int) -> None:
        """Wait until some of the victims are written, so that they can leave instead of younger blocks."""
        if time.monotonic() < self._no_wait_until:
            return
        deadline = time.monotonic() + _WAIT_S

        def arrived() -> bool:
            return sum(not entry.pins for entry in on_the_way) >= blocks

        for open_tier in self._tiers:
            if not open_tier.writer.wait_until(arrived, max(0.0, deadline - time.monotonic())):
                self._no_wait_until = time.monotonic() + _IMPATIENT_S
                return

    def _queue(self, victims: Sequence[Entry]) -> None:
        """Queue pinned victims, given tail first, in the order of a put; unpins them."""
        try:
            for open_tier in self._tiers:
                bit = open_tier.tier.bit
                lacking = [(e.place, e) for e in victims if e.place is not None and lacking_of(e, bit)]
                self._queue_for(open_tier, lacking[: self._room(open_tier)][::-1])
        finally:
            self._l1.unpin(victims)

    def _queue_for(self, open_tier: OpenTier, chosen: Sequence[Placed]) -> None:
        for kind in {place.kind for place, _ in chosen}:
            todo = [(place, entry) for place, entry in chosen if place.kind == kind]
            request = Request(kind)
            request.digests = self._queueing.entries(open_tier, todo, request)
            open_tier.writer.end(request)

    def _left(self, entry: Entry) -> None:
        """L1 evicted a block: count it where it is lost."""
        lacking = lacking_of(entry, self._mask)
        for open_tier in self._tiers if lacking else ():
            if open_tier.tier.bit & lacking:
                open_tier.tier.counters.add(lost_from_l1=1)
                open_tier.tier.history.note((entry.digest,), Event.DROPPED, "left L1 unwritten")

    def drain(self, deadline: float) -> None:
        """At close: queue the blocks that no tier holds, the most valuable first, while there is time."""
        self._l1.before_eviction = None
        if not self._tiers:
            return
        left = self._l1.pin_victims(lambda entries: [e for e in entries if lacking_of(e, self._mask) and not e.stored])
        try:
            while left and all(self._has_time(t, deadline) for t in self._tiers):
                step = max(1, min(_CLOSE_STEP, *(self._room(t) for t in self._tiers)))
                chosen = left[-step:]
                del left[-step:]
                self._queue(chosen)
        finally:
            for entry in left:
                self._left(entry)
            self._l1.unpin(left)

    def _has_time(self, open_tier: OpenTier, deadline: float) -> bool:
        writer = open_tier.writer
        left_s = max(0.0, deadline - time.monotonic())
        return writer.wait_until(lambda: writer.room_bytes >= self._block_bytes, left_s)

"""Bringing blocks of a tier into L1 slots (or staging memory), pinned for whoever asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.fetch import Fetch
from kvstore.served import L1, Served

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.entry import Entry
    from kvstore.l2.tier import Tier
    from kvstore.stack import OpenTier, Stack


class Loads:
    """Moves blocks from tiers into memory that the cache owns; thread-safe.

    Args:
        stack: The open cache.
        on_served: Told of every finished call that delivered something.
        share: Of the deadline, for one call.
    """

    def __init__(self, stack: Stack, on_served: Callable[[Served], None], share: float = 1.0) -> None:
        self._stack = stack
        self._on_served = on_served
        self._share = share

    def until(self) -> float:
        """When a read that begins now ends, on the monotonic clock."""
        return time.monotonic() + self._share * self._stack.config.defaults.deadline

    def pin(self, key: KVCacheKey, cancelled: threading.Event | None = None) -> list[Entry]:
        """Pin the leading blocks of a key in L1, loading what the tiers have.

        Stops early, with what there is, when ``cancelled`` is set.  None without L1.
        """
        served = Served(key)
        entries = self.hold(served, cancelled)
        try:
            self.conclude(served)
        except BaseException:
            if self._stack.l1 is not None:
                self._stack.l1.unpin(entries)
            raise
        return entries

    def hold(self, served: Served, cancelled: threading.Event | None = None) -> list[Entry]:
        """Pin the leading blocks of ``served.key`` like :meth:`pin`; :meth:`conclude` is left to the caller."""
        key, l1, until = served.key, self._stack.l1, self.until()
        n = len(key)
        entries: list[Entry] = []
        if l1 is None:
            return entries
        try:
            while len(entries) < n and not (cancelled and cancelled.is_set()):
                start = len(entries)
                entries += l1.pin_leading(key.digests[start:])
                served.note(L1, start, len(entries) - start)
                for open_tier in self._stack:
                    at = len(entries)
                    if at < n and time.monotonic() < until and not served.useless(open_tier.tier.name, at):
                        entries += self._pin_leading(open_tier, served, at, until)
                        served.note(open_tier.tier.name, at, len(entries) - at)
                if len(entries) == start:
                    break
        except BaseException:
            l1.unpin(entries)
            raise
        return entries

    def _pin_leading(self, open_tier: OpenTier, served: Served, start: int, until: float) -> list[Entry]:
        """Pin what a tier delivers into L1; a block that finds no room there ends the run."""
        entries: list[Entry] = []
        try:
            with contextlib.closing(Fetch(self._stack, open_tier, served, until).leading(start)) as chunks:
                for chunk in chunks:
                    n_blocks = len(chunk.blocks)
                    kept = chunk.keep()
                    entries += kept
                    if len(kept) < n_blocks:
                        break
        except BaseException:
            if self._stack.l1 is not None:
                self._stack.l1.unpin(entries)
            raise
        return entries

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
        if done:
            self._on_served(served)
        for open_tier in stack:
            tier = open_tier.tier
            asked, got = len(served.asked_of(tier.name)), served.blocks(tier.name)
            if asked:
                tier.counters.add(
                    lookups=asked,
                    hits=len(got),
                    misses=asked - len(got),
                    gated=served.gated(tier.name),
                    bytes_out=len(got) * nbytes,
                )
                self._emit(tier, digests, served, got)
            if got:
                used = [digests[i] for i in got]
                stack.seen.note(used)
                tier.touch(key.kind, used)
                if tier.asks_by_reading:
                    tier.promises.note(used[-1])

    def _emit(self, tier: Tier, digests: Sequence[bytes], served: Served, got: Sequence[int]) -> None:
        if self._stack.events.wanted:
            delivered = set(served.every())
            missed = [i for i in served.asked_of(tier.name) if i not in delivered]
            tier.emit("hit", [digests[i] for i in got])
            tier.emit("miss", [digests[i] for i in missed])

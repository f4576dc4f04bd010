"""Blocks on their way out: L1, then the tiers in order; the first hole ends a prefix."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.loads import L1, Loads, Served
from kvstore.results import Lookup
from kvstore.types import BlockStatus, Presence

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.keys import KVCacheKey
    from kvstore.l1.entry import Entry
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Rows


class Reads:
    """The read half of a cache; thread-safe.

    Prefix reads walk in rounds: each source in turn delivers the run that starts where the last
    one stopped, until the whole key is there or a full round brings nothing.
    """

    def __init__(self, stack: Stack, loads: Loads) -> None:
        self._stack = stack
        self._loads = loads

    def _until(self) -> float:
        return time.monotonic() + self._stack.config.defaults.deadline

    # -- presence

    def lookup(self, key: KVCacheKey) -> Lookup:
        """Count leading blocks that are somewhere; moves nothing."""
        stack, until = self._stack, self._until()
        digests, n = key.digests, len(key)
        by_tier = {} if stack.l1 is None else {L1: 0}
        by_tier |= {open_tier.tier.name: 0 for open_tier in stack}
        done = 0
        while done < n and time.monotonic() < until:
            start = done
            if stack.l1 is not None:
                run = stack.l1.leading(digests, done)
                by_tier[L1] += run
                done += run
            for open_tier in stack:
                if done < n:
                    run = open_tier.tier.leading(key.kind, digests[done:], until)
                    by_tier[open_tier.tier.name] += run
                    done += run
            if done == start:
                break
        return Lookup(done, done * key.block_tokens, by_tier)

    def contains_each(self, key: KVCacheKey) -> list[Presence]:
        """Presence of each block on its own."""
        stack, until = self._stack, self._until()
        digests = key.digests
        found = [Presence.ABSENT] * len(key)
        if stack.l1 is not None:
            found = [Presence.PRESENT if there else Presence.ABSENT for there in stack.l1.contains(digests)]
        for open_tier in stack:
            todo = [i for i, presence in enumerate(found) if presence is not Presence.PRESENT]
            if not todo:
                break
            tier = open_tier.tier
            answers = tier.presence(key.kind, [digests[i] for i in todo], tier.call(until))
            for i, answer in zip(todo, answers, strict=True):
                if answer is not Presence.ABSENT:
                    found[i] = answer
        return found

    # -- prefix

    def get(self, key: KVCacheKey, rows: Rows) -> int:
        """Copy the longest available prefix; returns the blocks delivered."""
        stack, until, n = self._stack, self._until(), len(key)
        done = 0
        served = Served(key)
        while done < n:
            start = done
            run = self._get_l1(key, rows, done)
            served.note(L1, done, run)
            done += run
            for open_tier in stack:
                if done == n or time.monotonic() >= until:
                    break
                run = self._get_tier(open_tier, key, rows, done, until)
                served.note(open_tier.tier.name, done, run)
                done += run
            if done == start:
                break
        self._loads.conclude(served)
        return done

    def _get_l1(self, key: KVCacheKey, rows: Rows, start: int) -> int:
        l1 = self._stack.l1
        if l1 is None:
            return 0
        entries = l1.pin_leading(key.digests[start:])
        if entries:
            self._copy_out(entries, rows, start)
        return len(entries)

    def _copy_out(self, entries: Sequence[Entry], rows: Rows, start: int) -> None:
        """Copy pinned entries to the caller and unpin them."""
        l1 = self._stack.l1
        if l1 is None:
            return
        try:
            for i, entry in enumerate(entries, start):
                np.copyto(rows.target(i), l1.pool.payload(entry.slot))
                rows.commit(i)
        finally:
            l1.unpin(entries)

    def _get_tier(self, open_tier: OpenTier, key: KVCacheKey, rows: Rows, start: int, until: float) -> int:
        tier = open_tier.tier
        # Decoding in several threads and then copying beats decoding here; a raw block is one copy from here.
        shared = tier.decoding and tier.shares(len(key) - start, self._stack.identity.spec.nbytes)
        if tier.direct and not shared:
            return self._get_direct(open_tier, key, rows, start, until)
        done = start
        for fetched in self._loads.fetch(open_tier, key, start, until):
            try:
                for block in fetched:
                    np.copyto(rows.target(done), block.data)
                    rows.commit(done)
                    done += 1
            finally:
                self._loads.let_go(fetched)
        return done - start

    def _get_direct(self, open_tier: OpenTier, key: KVCacheKey, rows: Rows, start: int, until: float) -> int:
        """Verify blocks where they lie and copy each once, into the caller's memory."""
        tier = open_tier.tier
        digests = key.digests[start:]
        promotion = self._loads.promotion(open_tier, key, start)

        def sink(i: int, block: OpenBlock) -> None:
            target = rows.target(start + i)
            slot = promotion.slot(i)
            if slot is None:
                block.write_into(target.data)
            else:
                block.write_into(slot.data)
                np.copyto(target, slot)
            rows.commit(start + i)

        try:
            statuses = open_tier.reader.direct(key.kind, digests, sink, tier.call(until, leading_only=True))
        except BaseException:  # the destination's own error, or KeyboardInterrupt: the reserved slots go back
            promotion.publish(0)
            raise
        run = next((i for i, s in enumerate(statuses) if s is not BlockStatus.DELIVERED), len(statuses))
        promotion.publish(run)
        return run

    # -- independent blocks

    def get_each(self, key: KVCacheKey, rows: Rows) -> list[BlockStatus]:
        """Copy every available block; one status per block."""
        stack, until = self._stack, self._until()
        statuses = [BlockStatus.ABSENT] * len(key)
        served = Served(key)
        served.note_each(L1, range(len(key)), self._each_l1(key, rows))
        for i in served.blocks(L1):
            statuses[i] = BlockStatus.DELIVERED
        for open_tier in stack:
            todo = [i for i, status in enumerate(statuses) if status is not BlockStatus.DELIVERED]
            if not todo or time.monotonic() >= until:
                break
            answers = self._each_tier(open_tier, key, todo, rows, until)
            got = [i for i, answer in zip(todo, answers, strict=True) if answer is BlockStatus.DELIVERED]
            served.note_each(open_tier.tier.name, todo, got)
            for i, answer in zip(todo, answers, strict=True):
                if answer is not BlockStatus.ABSENT:
                    statuses[i] = answer
        self._loads.conclude(served)
        return statuses

    def _each_l1(self, key: KVCacheKey, rows: Rows) -> list[int]:
        l1 = self._stack.l1
        if l1 is None:
            return []
        resident = {i: entry for i, entry in enumerate(l1.pin_each(key.digests)) if entry is not None}
        try:
            for i, entry in resident.items():
                np.copyto(rows.target(i), l1.pool.payload(entry.slot))
                rows.commit(i)
        finally:
            l1.unpin(resident.values())
        return list(resident)

    def _each_tier(
        self, open_tier: OpenTier, key: KVCacheKey, todo: Sequence[int], rows: Rows, until: float
    ) -> list[BlockStatus]:
        tier = open_tier.tier
        digests = [key.digests[i] for i in todo]
        if not tier.direct:
            return self._loads.each(open_tier, key, todo, rows, until)

        def sink(k: int, block: OpenBlock) -> None:
            block.write_into(rows.target(todo[k]).data)
            rows.commit(todo[k])

        return open_tier.reader.direct(key.kind, digests, sink, tier.call(until))

"""Blocks on their way out: L1, then the tiers in order; the first hole ends a prefix."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.delivery import deliver
from kvstore.fetch import Fetch, patience
from kvstore.l2.part import Part
from kvstore.l2.reader import FAILED_VERIFICATION, NO_ANSWER, leading_run
from kvstore.loads import Loads
from kvstore.promotion import Promotion
from kvstore.results import Lookup
from kvstore.served import L1, Served
from kvstore.stream import LayerStream
from kvstore.types import BlockStatus, Presence
from kvstore.visits import admitted, admitted_each

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.keys import KVCacheKey
    from kvstore.l1.entry import Entry
    from kvstore.stack import OpenTier, Stack
    from kvstore.stream import LayerGroup
    from kvstore.tensors import Rows


class Reads:
    """The read half of a cache; thread-safe.

    Prefix reads walk in rounds: each source in turn delivers the run that starts where the last
    one stopped, until the whole key is there or a full round brings nothing.
    """

    def __init__(self, stack: Stack, loads: Loads) -> None:
        self._stack = stack
        self._loads = loads

    # -- presence

    def lookup(self, key: KVCacheKey) -> Lookup:
        """Count leading blocks that are somewhere; moves nothing."""
        stack, until = self._stack, self._loads.until()
        digests, n = key.digests, len(key)
        by_tier = {} if stack.l1 is None else {L1: 0}
        by_tier |= {open_tier.tier.name: 0 for open_tier in stack}
        done = 0
        served = Served(key)
        while done < n and time.monotonic() < until:
            start = done
            if stack.l1 is not None:
                run = stack.l1.leading(digests, done)
                by_tier[L1] += run
                done += run
            for open_tier in stack:
                tier = open_tier.tier
                if done == n or served.useless(tier.name, done):
                    continue
                if not stack.gate.admits(tier.name, key, done):
                    continue
                found = tier.ask_leading(key, done, patience(stack, open_tier, until))
                if found is None:
                    served.silent.add(tier.name)
                    continue
                if found:
                    if not stack.gate.admits(tier.name, key, done, done + found):
                        continue
                    stack.gate.tell(tier.name, digests[done + found - 1])
                by_tier[tier.name] += found
                served.note(tier.name, done, found)
                done += found
            if done == start:
                break
        return Lookup(done, done * key.block_tokens, by_tier)

    def contains_each(self, key: KVCacheKey) -> list[Presence]:
        """Presence of each block on its own."""
        stack, until = self._stack, self._loads.until()
        digests = key.digests
        found = [Presence.ABSENT] * len(key)
        if stack.l1 is not None:
            found = [Presence.PRESENT if there else Presence.ABSENT for there in stack.l1.contains(digests)]
        for open_tier in stack:
            todo = [i for i, presence in enumerate(found) if presence is not Presence.PRESENT]
            if not todo:
                break
            tier = open_tier.tier
            if not stack.gate.admits_each(tier.name, key, len(todo)):
                continue
            answers = tier.presence(Part(key, todo), tier.call(patience(stack, open_tier, until)))
            for i, answer in zip(todo, answers, strict=True):
                if answer is not Presence.ABSENT:
                    found[i] = answer
            stack.gate.tell_each(tier.name, [digests[i] for i in todo if found[i] is Presence.PRESENT])
        return found

    # -- prefix

    def pin(self, key: KVCacheKey) -> list[Entry]:
        """Pin the longest available prefix in L1."""
        return self._loads.pin(key)

    def stream(self, key: KVCacheKey) -> Iterator[LayerGroup]:
        """Yield the layers of the longest available prefix."""
        return LayerStream(self._stack, self._loads, key).groups()

    def get(self, key: KVCacheKey, rows: Rows, cancelled: threading.Event | None = None) -> int:
        """Copy the longest available prefix; returns the blocks delivered.

        Stops early, with what there is, when ``cancelled`` is set.
        """
        stack, until, n = self._stack, self._loads.until(), len(key)
        done = 0
        served = Served(key, rows)
        served.cancelled = cancelled or served.cancelled
        while done < n and not served.cancelled.is_set():
            start = done
            run = self._get_l1(key, rows, done)
            served.note(L1, done, run)
            done += run
            for open_tier in stack:
                if done == n or time.monotonic() >= until or served.cancelled.is_set():
                    break
                if served.useless(open_tier.tier.name, done):
                    continue
                run = self._get_tier(open_tier, served, rows, done, until)
                served.note(open_tier.tier.name, done, run)
                done += run
            if done == start:
                break
        rows.finish()
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
            deliver(l1, rows, range(start, start + len(entries)), entries)
        finally:
            l1.unpin(entries)

    def _get_tier(self, open_tier: OpenTier, served: Served, rows: Rows, start: int, until: float) -> int:
        tier = open_tier.tier
        # Decoding in several threads and then copying beats decoding here; a raw block is one copy from here.
        shared = tier.decoding and tier.shares(len(served.key) - start, self._stack.identity.spec.nbytes)
        if tier.direct and not shared:
            return self._get_direct(open_tier, served, rows, start, until)
        done = start
        with contextlib.closing(Fetch(self._stack, open_tier, served, until).leading(start)) as chunks:
            for chunk in chunks:
                try:
                    for block in chunk.blocks:
                        rows.fill(done, block.data)
                        done += 1
                finally:
                    chunk.let_go()
                if served.cancelled.is_set():
                    break
        return done - start

    def _get_direct(self, open_tier: OpenTier, served: Served, rows: Rows, start: int, until: float) -> int:
        """Verify blocks where they lie and copy each once, into the caller's memory."""
        if not admitted(self._stack, open_tier, served, start):
            return 0
        began, tier, key = time.perf_counter(), open_tier.tier, served.key
        promotion = Promotion(self._stack, open_tier, key, start)

        def sink(i: int, block: OpenBlock) -> None:
            slot = promotion.slot(i)
            if slot is None:
                _write(block, rows, start + i)
            else:
                block.write_into(slot.data)
                rows.fill(start + i, slot)

        try:
            statuses = open_tier.reader.direct(Part.rest(key, start), sink, tier.call(until, leading_only=True))
        except BaseException:  # the destination's own error, or KeyboardInterrupt: the reserved slots go back
            promotion.publish(0)
            raise
        served.note_corrupt(tier.name, [i for i, s in enumerate(statuses, start) if s in FAILED_VERIFICATION])
        run = leading_run(statuses)
        promotion.publish(run)
        open_tier.reader.note_read(run, time.perf_counter() - began, failed=statuses[0] in NO_ANSWER)
        return run

    # -- independent blocks

    def get_each(self, key: KVCacheKey, rows: Rows, cancelled: threading.Event | None = None) -> list[BlockStatus]:
        """Copy every available block; one status per block.  Asks no further tier once ``cancelled`` is set."""
        served = Served(key, rows)
        served.cancelled = cancelled or served.cancelled
        statuses = self.fill_each(served, rows, self._loads.until())
        self._loads.conclude(served)
        return statuses

    def fill_each(self, served: Served, rows: Rows, until: float) -> list[BlockStatus]:
        """Copy the blocks of ``served.key`` like :meth:`get_each`; to conclude is left to the caller."""
        stack, key = self._stack, served.key
        statuses = [BlockStatus.ABSENT] * len(key)
        served.note_each(L1, range(len(key)), self._each_l1(key, rows))
        for i in served.blocks(L1):
            statuses[i] = BlockStatus.DELIVERED
        for open_tier in stack:
            todo = [i for i, status in enumerate(statuses) if status is not BlockStatus.DELIVERED]
            if not todo or time.monotonic() >= until or served.cancelled.is_set():
                break
            wanted, todo = todo, admitted_each(stack, open_tier, served, todo)
            answers = self._each_tier(open_tier, served, todo, rows, until) if todo else []
            got = [i for i, answer in zip(todo, answers, strict=True) if answer is BlockStatus.DELIVERED]
            served.note_each(open_tier.tier.name, wanted, got)
            bad = [i for i, answer in zip(todo, answers, strict=True) if answer in FAILED_VERIFICATION]
            served.note_corrupt(open_tier.tier.name, bad)
            for i, answer in zip(todo, answers, strict=True):
                if answer is not BlockStatus.ABSENT:
                    statuses[i] = answer
        rows.finish()
        return statuses

    def _each_l1(self, key: KVCacheKey, rows: Rows) -> list[int]:
        l1 = self._stack.l1
        if l1 is None:
            return []
        resident = {i: entry for i, entry in enumerate(l1.pin_each(key.digests)) if entry is not None}
        try:
            deliver(l1, rows, list(resident), list(resident.values()))
        finally:
            l1.unpin(resident.values())
        return list(resident)

    def _each_tier(
        self, open_tier: OpenTier, served: Served, todo: Sequence[int], rows: Rows, until: float
    ) -> list[BlockStatus]:
        tier = open_tier.tier
        if not tier.direct:
            return Fetch(self._stack, open_tier, served, until).each(todo, rows)

        def sink(k: int, block: OpenBlock) -> None:
            _write(block, rows, todo[k])

        began = time.perf_counter()
        statuses = open_tier.reader.direct(Part(served.key, todo), sink, tier.call(until))
        seconds, delivered = time.perf_counter() - began, statuses.count(BlockStatus.DELIVERED)
        open_tier.reader.note_read(delivered, seconds, failed=NO_ANSWER.issuperset(statuses))
        return statuses


def _write(block: OpenBlock, rows: Rows, i: int) -> None:
    """Write a verified record's block, straight from where it lies if it is stored as it is."""
    if block.raw is None:
        block.write_into(rows.target(i).data)
        rows.commit(i)
    else:
        rows.fill(i, np.frombuffer(block.raw, np.uint8))

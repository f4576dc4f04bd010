"""Reads of many blocks in chunks: while one is copied out, the next ones are being read."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np

from kvstore.l2.landing import Landing
from kvstore.l2.part import Part
from kvstore.l2.reader import FAILED_VERIFICATION, NO_ANSWER, leading_run
from kvstore.promotion import SlotLanding
from kvstore.types import BlockStatus
from kvstore.visits import admitted

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.l1.entry import Entry
    from kvstore.l2.tier import Tier
    from kvstore.served import Served
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Bytes, Rows

_CHUNK_BYTES: Final = 16 << 20  # a hand-off costs 0.1 ms, reading this takes 5 ms and more
_FIRST_CHUNK_BYTES: Final = 4 << 20  # so that copying out begins soon
_AHEAD: Final = 3  # chunks under way behind the one that is copied out; with _CHUNK_BYTES the memory of one call
_L1_SHARE: Final = 8  # what may be absent takes at most this part of L1 a chunk: it is evicted in vain then
_PACK_BLOCKS: Final = 16  # the largest pack: one request tells whether a prefix is there at all


@dataclass(slots=True)
class Fetched:
    """One block that a tier delivered.

    Attributes:
        data: Its bytes, in an L1 slot or in staging memory.
        entry: The pinned L1 entry, None for staging memory.
    """

    data: Bytes
    entry: Entry | None = None


class Chunk:
    """Blocks that arrived together; ended by :meth:`keep` or :meth:`let_go`."""

    def __init__(self, stack: Stack, landing: Landing, blocks: Sequence[Fetched]) -> None:
        self.blocks = blocks
        self._stack = stack
        self._landing = landing
        self._staged = range(len(blocks))

    def keep(self) -> list[Entry]:
        """Give the caller the leading blocks that are in L1, pinned; lets go of the rest."""
        run = next((i for i, block in enumerate(self.blocks) if block.entry is None), len(self.blocks))
        kept, self.blocks = self.blocks[:run], self.blocks[run:]
        self.let_go()
        return [block.entry for block in kept if block.entry is not None]

    def let_go(self) -> None:
        """Unpin what is in L1 and give staging memory back."""
        blocks, self.blocks = self.blocks, ()
        if self._stack.l1 is not None:
            self._stack.l1.unpin([block.entry for block in blocks if block.entry is not None])
        self._landing.release(self._staged)


class Fetch:
    """Brings blocks of one tier into memory of the cache; belongs to the calling thread.

    Args:
        stack: The open cache.
        open_tier: Whose blocks.
        served: The call; what is found out about the tier is noted there.
        until: When the call ends, on the monotonic clock.
    """

    def __init__(self, stack: Stack, open_tier: OpenTier, served: Served, until: float) -> None:
        self.stack = stack
        self.open_tier = open_tier
        self.served = served
        self.until = until
        self.shared = True
        """Whether the tier's threads read; else it is the calling thread."""
        self._heard = not open_tier.tier.asks_by_reading  # the others are asked for existence before

    def leading(self, start: int) -> Generator[Chunk, None, None]:
        """Deliver the leading blocks from ``key[start]``, landed in L1 as far as it has room.

        Ends at the first block that the tier cannot deliver.  Blocks behind it that were read
        already stay in L1.  Close the iterator when its end is not wanted.  A tier that the gate
        declines delivers nothing; others learn from how long it took, copying out included.
        """
        if not admitted(self.stack, self.open_tier, self.served, start):
            return
        began, delivered, tier = time.perf_counter(), 0, self.open_tier.tier
        try:
            with contextlib.closing(self._leading(start)) as chunks:
                for chunk in chunks:
                    delivered += len(chunk.blocks)
                    yield chunk
        finally:
            if not self.served.cancelled.is_set():
                failed = tier.name in self.served.silent
                self.open_tier.reader.note_read(delivered, time.perf_counter() - began, failed=failed)

    def _leading(self, start: int) -> Generator[Chunk, None, None]:
        for ranges in self._phases(start):
            with contextlib.closing(in_flight(self._begin, ranges)) as reads:
                for read in reads:
                    if read.indices.start > start:
                        read.extend(self.until)
                    chunk = read.finish()
                    complete = len(chunk.blocks) == len(read.indices)
                    yield chunk
                    if not complete:
                        return

    def _phases(self, start: int) -> Iterator[Iterator[range]]:
        """Chunks of blocks that are probably there, then, once all of them were, of the others."""
        tier, key = self.open_tier.tier, self.served.key
        if not tier.asks_by_reading:
            run = tier.ask_leading(key, start, patience(self.stack, self.open_tier, self.until))
            if run is None:
                self.served.silent.add(tier.name)
            if run and not admitted(self.stack, self.open_tier, self.served, start, start + run):
                run = 0
            stop = start + (run or 0)
            self.shared = tier.shares(stop - start, self.stack.identity.spec.nbytes)
            yield self._chunks(start, stop)
            return
        known = tier.promises.until(key, start)
        probed = min(known + _PACK_BLOCKS - self._misplaced(known), len(key))
        probe = [range(known, probed)] if known < probed else []
        yield itertools.chain(self._chunks(start, known), probe)
        yield self._chunks(probed, len(key))

    def each(self, todo: Sequence[int], rows: Rows) -> list[BlockStatus]:
        """Read blocks of the key, each on its own, through staging memory into their rows."""
        statuses: list[BlockStatus] = []
        began = time.perf_counter()

        def begin(part: range) -> _EachRead:
            until = self.until if part.start else patience(self.stack, self.open_tier, self.until)
            return _EachRead(self, todo[part.start : part.stop], until)

        with contextlib.closing(in_flight(begin, self._chunks(0, len(todo)))) as reads:
            for read in reads:
                if statuses:
                    read.extend(self.until)
                answers = read.finish(rows)
                statuses += answers
                if NO_ANSWER.issuperset(answers):  # the others would wait as long for nothing
                    statuses += [answers[0]] * (len(todo) - len(statuses))
                    break
        failed = NO_ANSWER.issuperset(statuses)
        self.open_tier.reader.note_read(len(_delivered(statuses)), time.perf_counter() - began, failed=failed)
        return statuses

    def _begin(self, indices: range) -> _ChunkRead:
        until = self.until if self._heard else patience(self.stack, self.open_tier, self.until)
        self._heard = True
        return _ChunkRead(self, indices, until)

    def _chunks(self, start: int, stop: int) -> Iterator[range]:
        """Cut into chunks, a small one first."""
        nbytes = self.stack.identity.spec.nbytes
        most = max(1, _CHUNK_BYTES // nbytes)
        size = max(1, min(most, _FIRST_CHUNK_BYTES // nbytes))
        if self.open_tier.tier.asks_by_reading:
            if self.stack.l1 is not None:
                most = min(most, self.stack.l1.pool.n_slots // _L1_SHARE)
            most = max(1, -(-most // _PACK_BLOCKS)) * _PACK_BLOCKS
            size = most - self._misplaced(start)  # no pack is asked for twice
        while start < stop:
            yield range(start, min(start + size, stop))
            start += size
            size = most

    def _misplaced(self, i: int) -> int:
        """How many blocks stand between block ``i`` and the beginning of its pack."""
        key = self.served.key
        return (key.start_block + i) % _PACK_BLOCKS if key.position_known else 0


class _Read(Protocol):
    def leave(self) -> None:
        """End without waiting."""


R = TypeVar("R", bound=_Read)


def in_flight(begin: Callable[[range], R], ranges: Iterator[range]) -> Generator[R, None, None]:
    """Yield reads in order, to be finished by the caller, while up to three more are under way.

    Those that the caller does not get to are left, at the latest when the iterator is closed.
    """
    running: deque[R] = deque()
    try:
        for indices in ranges:
            running.append(begin(indices))
            if len(running) > _AHEAD:
                yield running.popleft()
        while running:
            yield running.popleft()
    finally:
        for read in running:
            read.leave()


def patience(stack: Stack, open_tier: OpenTier, until: float) -> float:
    """Until when to wait for a tier's first sign of life: others may be waiting behind it."""
    if open_tier.tier.direct or open_tier is stack.tiers[-1]:
        return until
    now = time.monotonic()
    return now + max(0.0, until - now) / 2


class _ChunkRead:
    """Consecutive blocks on their way to where they stay; ``finish`` or ``leave`` ends it."""

    def __init__(self, fetch: Fetch, indices: range, until: float) -> None:
        self.indices = indices
        self._fetch = fetch
        self._tier: Tier = fetch.open_tier.tier
        self._part = Part(fetch.served.key, indices)
        self._call = self._tier.call(until, leading_only=True)
        self._landing = SlotLanding(fetch.stack, fetch.open_tier, self._part)
        self._pooled = None
        if fetch.shared:
            try:
                self._pooled = fetch.open_tier.reader.begin(self._part, self._landing, self._call)
            except BaseException:
                self._landing.publish((), keep=0)
                raise

    def extend(self, until: float) -> None:
        if self._pooled is not None:
            self._pooled.extend(until)

    def finish(self) -> Chunk:
        try:
            statuses = self._here() if self._pooled is None else self._pooled.finish()
        except BaseException:  # such as KeyboardInterrupt: the reserved slots go back
            self._landing.publish((), keep=0)
            raise
        return self._land(statuses)

    def _here(self) -> list[BlockStatus]:
        """Read in the calling thread."""

        def sink(i: int, block: OpenBlock) -> None:
            block.write_into(self._landing.frame(i).block)

        return self._fetch.open_tier.reader.direct(self._part, sink, self._call)

    def _land(self, statuses: Sequence[BlockStatus]) -> Chunk:
        """Publish what arrived; the leading run stays pinned for the caller."""
        served, tier = self._fetch.served, self._tier.name
        served.note_corrupt(tier, [self.indices[i] for i, s in enumerate(statuses) if s in FAILED_VERIFICATION])
        run = leading_run(statuses)
        if run < len(statuses) and statuses[run] in NO_ANSWER:
            served.silent.add(tier)
        entries = self._landing.publish(_delivered(statuses), keep=run)
        blocks = [Fetched(self._landing.data(i, entries.get(i)), entries.get(i)) for i in range(run)]
        return Chunk(self._fetch.stack, self._landing, blocks)

    def leave(self) -> None:
        statuses = [] if self._pooled is None else self._pooled.leave()
        self._landing.publish(_delivered(statuses), keep=0)


class _EachRead:
    """Unrelated blocks of a key on their way through staging memory; ``finish`` or ``leave`` ends it."""

    def __init__(self, fetch: Fetch, todo: Sequence[int], until: float) -> None:
        self._todo = todo
        reader = fetch.open_tier.reader
        self._landing = Landing(reader.frames)
        self._pooled = reader.begin(Part(fetch.served.key, todo), self._landing, fetch.open_tier.tier.call(until))

    def extend(self, until: float) -> None:
        self._pooled.extend(until)

    def finish(self, rows: Rows) -> list[BlockStatus]:
        statuses = self._pooled.finish()
        for i in _delivered(statuses):
            rows.fill(self._todo[i], np.frombuffer(self._landing.frame(i).block, np.uint8))
        self._release()
        return statuses

    def leave(self) -> None:
        self._pooled.leave()
        self._release()

    def _release(self) -> None:
        self._landing.release([i for i in range(len(self._todo)) if i not in self._landing.abandoned])


def _delivered(statuses: Sequence[BlockStatus]) -> list[int]:
    return [i for i, status in enumerate(statuses) if status is BlockStatus.DELIVERED]

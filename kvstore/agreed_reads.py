"""Reads of a rank whose answers are those of all ranks of its group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.gathering import Gathered
from kvstore.group import Agreement, Clock, question
from kvstore.results import Lookup
from kvstore.served import Served
from kvstore.stream import LayerGroup, LayerStream
from kvstore.tensors import staging_rows
from kvstore.types import BlockStatus, Presence

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.entry import Entry
    from kvstore.loads import Loads
    from kvstore.reads import Reads
    from kvstore.stack import Stack
    from kvstore.tensors import Rows

_PRESENCES: Final = (Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT)
"""The least certain first: what one rank lacks, none can use."""
_STATUSES: Final = (
    BlockStatus.UNAVAILABLE,
    BlockStatus.TIMEOUT,
    BlockStatus.CORRUPT,
    BlockStatus.MISMATCH,
    BlockStatus.ABSENT,
    BlockStatus.DELIVERED,
)
"""The worst first."""
_CHUNK_BYTES: Final = 256 << 20
"""Of one question of a read: what it keeps pinned or staged while the ranks agree. A question costs
about as much as moving 1 MiB, so more would save nothing."""


def chunk_blocks(block_bytes: int) -> int:
    """Blocks that one question of this rank may be about at most."""
    return max(1, _CHUNK_BYTES // block_bytes)


class AgreedReads:
    """The read half of a cache whose group agrees on every answer; thread-safe as far as a group can be.

    Each call does the rank's own work first, within its share of the deadline and in memory of the
    cache, then meets the other ranks, and copies to the caller what all of them have.  A call whose
    own work raises tells the others that it has nothing, and raises.
    """

    def __init__(self, stack: Stack, loads: Loads, reads: Reads, agreement: Agreement) -> None:
        self._stack = stack
        self._loads = loads
        self._reads = reads
        self._agreement = agreement

    def _clock(self) -> Clock:
        return Clock.start(self._stack.config.defaults.deadline)

    def _agree(self, asked: int, find: Callable[[], list[int]], clock: Clock, nothing: list[int]) -> list[int]:
        """Meet the other ranks with what ``find`` returns; nothing once the group is broken."""
        if self._agreement.broken:
            return nothing
        try:
            found = find()
        except BaseException:
            self._agreement.agree(asked, nothing, clock, nothing)
            raise
        return self._agreement.agree(asked, found, clock, nothing)

    # -- presence

    def lookup(self, key: KVCacheKey) -> Lookup:
        """Count leading blocks that every rank has somewhere."""
        mine: list[Lookup] = [Lookup(0, 0, dict.fromkeys(self._sources(), 0))]

        def find() -> list[int]:
            mine[0] = self._reads.lookup(key)
            return [mine[0].blocks]

        if len(key):
            (agreed,) = self._agree(question("lookup", key.digests), find, self._clock(), [0])
            self._agreement.trimmed(mine[0].blocks - agreed)
            return _cut(mine[0], agreed, key.block_tokens)
        return mine[0]

    def _sources(self) -> list[str]:
        return [*(["l1"] if self._stack.l1 is not None else []), *(t.tier.name for t in self._stack)]

    def contains_each(self, key: KVCacheKey) -> list[Presence]:
        """Presence of each block on the rank that knows least of it."""
        unknown = [_PRESENCES.index(Presence.UNKNOWN)] * len(key)

        def find() -> list[int]:
            return [_PRESENCES.index(presence) for presence in self._reads.contains_each(key)]

        if not len(key):
            return []
        agreed = self._agree(question("contains_each", key.digests), find, self._clock(), unknown)
        return [_PRESENCES[code] for code in agreed]

    # -- prefix

    def get(self, key: KVCacheKey, rows: Rows) -> int:
        """Copy the longest prefix that every rank has; one question for each 256 MiB or less."""
        clock, whole, done = self._clock(), Served(key, rows), 0
        for start, stop in itertools.pairwise(self._cuts(len(key))):
            agreed = self._get(key[start:stop], start, whole, clock)
            done += agreed
            if agreed < stop - start:
                break
        rows.finish()
        self._loads.conclude(whole)
        return done

    def _cuts(self, n_blocks: int) -> list[int]:
        return [*range(0, n_blocks, self._agreement.chunk_blocks), n_blocks]

    def _get(self, part: KVCacheKey, start: int, whole: Served, clock: Clock) -> int:
        with Gathered(self._stack, part) as gathered:
            asked = question("get", part.digests)
            (agreed,) = self._agree(asked, lambda: [gathered.gather(clock.local)], clock, [0])
            self._agreement.trimmed(len(gathered.blocks) - agreed)
            if whole.rows is not None:
                gathered.copy_to(whole.rows, start, agreed)
        whole.absorb(gathered.served, start, agreed)
        return agreed

    def pin(self, key: KVCacheKey) -> list[Entry]:
        """Pin the longest prefix that every rank could pin in its L1."""
        served, whole = Served(key), Served(key)
        entries: list[Entry] = []

        def find() -> list[int]:
            entries.extend(self._loads.hold(served))
            return [len(entries)]

        if not len(key) or self._stack.l1 is None:
            return entries
        kept = 0
        try:
            (kept,) = self._agree(question("acquire", key.digests), find, self._clock(), [0])
            whole.absorb(served, 0, kept)
            self._loads.conclude(whole)
        except BaseException:
            kept = 0
            raise
        finally:
            self._stack.l1.unpin(entries[kept:])
        self._agreement.trimmed(len(entries) - kept)
        return entries[:kept]

    def stream(self, key: KVCacheKey) -> Iterator[LayerGroup]:
        """Yield the layers of the longest prefix that every rank has; one question for each group."""

        def meet(began: float, n_groups: int, found: Sequence[int]) -> list[int]:
            asked = question(f"stream {n_groups}", key.digests)
            clock = Clock.start(self._stack.config.defaults.deadline, began)
            agreed = self._agree(asked, lambda: list(found), clock, [0] * len(found))
            self._agreement.trimmed(found[0] - agreed[0])
            return agreed

        if not len(key):
            return iter(())
        return LayerStream(self._stack, self._loads, key, meet).groups()

    # -- independent blocks

    def get_each(self, key: KVCacheKey, rows: Rows) -> list[BlockStatus]:
        """Copy every block that all ranks have; a block's status is its worst one on any rank."""
        clock, whole = self._clock(), Served(key, rows)
        statuses: list[BlockStatus] = []
        for start, stop in itertools.pairwise(self._cuts(len(key))):
            statuses += self._get_each(key[start:stop], start, whole, clock)
        rows.finish()
        self._loads.conclude(whole)
        return statuses

    def _get_each(self, part: KVCacheKey, start: int, whole: Served, clock: Clock) -> list[BlockStatus]:
        staged = np.empty((len(part), self._stack.identity.spec.nbytes), np.uint8)
        served = Served(part)
        nothing = [_STATUSES.index(BlockStatus.UNAVAILABLE)] * len(part)

        def find() -> list[int]:
            return [_STATUSES.index(s) for s in self._reads.fill_each(served, staging_rows(staged), clock.local)]

        codes = self._agree(question("get_each", part.digests), find, clock, nothing)
        statuses = [_STATUSES[code] for code in codes]
        kept = [i for i, status in enumerate(statuses) if status is BlockStatus.DELIVERED]
        if whole.rows is not None:
            for i in kept:
                whole.rows.fill(start + i, staged[i])
        self._agreement.trimmed(served.total - len(kept))
        whole.absorb_each(served, start, kept)
        return statuses


def _cut(lookup: Lookup, n_blocks: int, block_tokens: int) -> Lookup:
    """Leave out blocks behind the first ``n_blocks``, those of the slowest tiers first."""
    surplus, by_tier = lookup.blocks - n_blocks, dict(lookup.by_tier)
    for name in reversed(by_tier):
        less = min(surplus, by_tier[name])
        by_tier[name] -= less
        surplus -= less
    return Lookup(n_blocks, n_blocks * block_tokens, by_tier)

"""Blocks into the write queues of tiers: pinned where they lie in L1, or copied where they do not."""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.backend import PutHint
from kvstore.history import Event
from kvstore.l1.entry import Place
from kvstore.l2.part import Part
from kvstore.l2.write_queue import Request, Write
from kvstore.record import RecordMeta
from kvstore.types import Presence

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.l2.tier import Tier
    from kvstore.opening import OpenTier
    from kvstore.tensors import Rows

Placed = tuple[Place, "Entry"]
"""A pinned entry and where its block stands."""


def parent_of(key: KVCacheKey, i: int) -> bytes | None:
    """Digest of the block before block ``i`` of a key, None for a first or unknown one."""
    return key.digests[i - 1] if i else key.parent


def lineage(key: KVCacheKey, indices: Sequence[int]) -> list[tuple[bytes, bytes | None]]:
    """(digest, parent) of some blocks of a key, as L1 wants them."""
    digests = key.digests
    return [(digests[i], parent_of(key, i)) for i in indices]


def place_of(key: KVCacheKey, i: int) -> Place:
    """Where block ``i`` of a key stands."""
    return Place(key.kind, key.group, key.start_block + i if key.position_known else -1)


def placed(key: KVCacheKey, held: Held) -> list[Placed]:
    """Entries of a key with the places of their blocks."""
    kind, group, known, start = key.kind, key.group, key.position_known, key.start_block
    return [(Place(kind, group, start + i if known else -1), entry) for i, entry in held]


Held = Sequence[tuple[int, "Entry"]]
"""Pinned entries by their index in a key, ascending."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Blocks in a caller's memory.

    Attributes:
        key: Their names.
        rows: Their bytes.
        repair: Indices of those whose copy in the tier is damaged.
    """

    key: KVCacheKey
    rows: Rows
    repair: Collection[int] = ()


class Queueing:
    """Describes writes and hands them to the tiers' writers; thread-safe.

    Args:
        l1: Where entries lie; None without L1.
        marks: Guards the ``stored`` and ``pending`` masks of its entries.
        block_bytes: Raw bytes of a block.
    """

    def __init__(self, l1: L1Cache | None, marks: threading.Lock, block_bytes: int) -> None:
        self._l1 = l1
        self._marks = marks
        self._block_bytes = block_bytes

    def lacking(self, tier: Tier, key: KVCacheKey, held: Held) -> tuple[Held, set[bytes], set[bytes]]:
        """Part pinned blocks by what a tier has of them.

        Returns:
            What it neither holds nor is about to get; digests of what it holds; digests of what is
            queued for it.
        """
        bit = tier.bit
        with self._marks:
            todo = [(i, e) for i, e in held if not (e.stored | e.pending) & bit]
            known = [(i, e) for i, e in held if e.stored & bit]
            coming = {e.digest for _, e in held if e.pending & bit} if len(todo) + len(known) < len(held) else set()
        if known and tier.direct:  # asking is cheap there, and another process may have evicted some
            found = tier.presence(Part(key, [i for i, _ in known]), tier.call())
            gone = [pair for pair, p in zip(known, found, strict=True) if p is Presence.ABSENT]
            known = [pair for pair, p in zip(known, found, strict=True) if p is Presence.PRESENT]
            todo = sorted(todo + gone, key=lambda pair: pair[0])
        return todo, {e.digest for _, e in known}, coming

    def entries(
        self,
        open_tier: OpenTier,
        todo: Sequence[Placed],
        request: Request | None = None,
        repair: Collection[bytes] = (),
    ) -> list[bytes]:
        """Queue pinned entries for a tier; those taken are pinned once more until they are written.

        Args:
            open_tier: Where to.
            todo: In the order in which they shall be written.
            request: What they belong to.
            repair: Digests of those whose copy in the tier is damaged.

        Returns:
            Digests of those taken: the leading ones, until the queue was full.
        """
        l1, tier = self._l1, open_tier.tier
        prefixes = {kind: tier.prefix_for_writes(kind) for kind in {place.kind for place, _ in todo}}
        if l1 is None or None in prefixes.values():
            tier.counters.add(refused_medium=len(todo))
            tier.history.note([entry.digest for _, entry in todo], Event.REFUSED, "unavailable")
            return []
        l1.pin([entry for _, entry in todo])
        writes = []
        with self._marks:
            for place, entry in todo:
                raw, done = l1.pool.payload(entry.slot).data, functools.partial(self._written, l1, tier.bit, entry)
                write = _write_of(prefixes[place.kind] or b"", place, entry.digest, entry.parent, raw)
                write.done, write.request, write.repair = done, request, entry.digest in repair
                if not entry.pending:  # the header page has room for one tier's head at a time
                    write.frame = l1.pool.frame(entry.slot)
                entry.pending |= tier.bit
                writes.append(write)
        taken = open_tier.writer.enqueue(writes)
        for write in writes[taken:]:
            write.release(stored=False)
        return [entry.digest for _, entry in todo[:taken]]

    def _written(self, l1: L1Cache, bit: int, entry: Entry, stored: bool) -> None:
        with self._marks:
            entry.pending &= ~bit
            if stored:
                entry.stored |= bit
        l1.unpin([entry])

    def copies(self, open_tier: OpenTier, copied: Copied, blocks: Sequence[int], request: Request) -> list[bytes]:
        """Queue copies of a caller's blocks for a tier, one by one, so that the queue's bound limits them too.

        Returns:
            Digests of those taken: the leading ones, until the queue was full.
        """
        tier, key = open_tier.tier, copied.key
        prefix = tier.prefix_for_writes(key.kind) if blocks else None
        if prefix is None:
            tier.counters.add(refused_medium=len(blocks))
            tier.history.note([key.digests[i] for i in blocks], Event.REFUSED, "unavailable")
            return []
        taken: list[bytes] = []
        for i in blocks:
            if open_tier.writer.room_bytes < self._block_bytes:
                break
            staging = np.empty(self._block_bytes, np.uint8)
            copied.rows.copy_to(i, staging)
            write = staged(key, i, staging.data, prefix, request)
            write.repair = i in copied.repair
            if not open_tier.writer.enqueue([write]):
                tier.counters.add(refused_queue_full=-1)  # counted with the rest below
                break
            taken.append(key.digests[i])
        tier.counters.add(refused_queue_full=len(blocks) - len(taken))
        tier.history.note([key.digests[i] for i in blocks[len(taken) :]], Event.QUEUE_FULL)
        return taken


def staged(key: KVCacheKey, i: int, raw: memoryview, prefix: bytes, request: Request | None) -> Write:
    """Describe a write of block ``i`` whose bytes belong to the write itself."""
    write = _write_of(prefix, place_of(key, i), key.digests[i], parent_of(key, i), raw)
    write.request = request
    return write


def end_request(
    open_tier: OpenTier,
    request: Request,
    taken: Collection[bytes],
    known: Collection[bytes],
    digests: Sequence[bytes],
) -> None:
    """Tell a tier's writer which blocks a request was about, so that its head ends as the youngest.

    Args:
        open_tier: Where the writes went.
        request: Theirs.
        taken: Digests that were queued.
        known: Digests that the tier holds and that were used too.
        digests: All of them, in the order of the sequence.
    """
    request.digests = [d for d in digests if d in taken or d in known]
    request.known = next((n for n in range(len(request.digests), 0, -1) if request.digests[n - 1] in known), 0)
    open_tier.writer.end(request)


def _write_of(prefix: bytes, place: Place, digest: bytes, parent: bytes | None, raw: memoryview) -> Write:
    position = place.position
    meta = RecordMeta(
        digest=digest,
        parent=parent,
        block_index=max(position, 0),
        group=place.group,
        parent_known=parent is not None or position >= 0,
    )
    hint = PutHint(parent=prefix + parent if parent else b"", position=position)
    return Write(meta, prefix + digest, hint, raw, _nothing)


def _nothing(stored: bool) -> None:
    """Staged bytes belong to the write itself; nothing to release."""

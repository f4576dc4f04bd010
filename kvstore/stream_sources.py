"""Where the layers of a stream come from: resident blocks, or segments of a tier's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore.backend import Capability, Receive
from kvstore.errors import BackendError, BackendTimeoutError, CorruptRecordError, PluginError
from kvstore.l2.bad_record import BadRecord
from kvstore.l2.part import Part
from kvstore.l2.workers import Job, strided
from kvstore.record import HEADER_BYTES
from kvstore.segments import MAX_SEAL_BYTES
from kvstore.types import ReadStatus

if TYPE_CHECKING:
    from kvstore.blocks import SegmentTable
    from kvstore.keys import KVCacheKey
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.entry import Entry
    from kvstore.segments import SegmentGeometry
    from kvstore.stack import OpenTier
    from kvstore.tensors import Bytes


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Segments that travel together: whole layers of a block.

    Attributes:
        first_segment: Index of the first one in the block.
        segments: The segments, in order.
    """

    first_segment: int
    segments: tuple[SegmentGeometry, ...]

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of the group in one block."""
        return sum(segment.raw_bytes for segment in self.segments)

    @property
    def raw_end(self) -> int:
        """Where the group ends in the raw block."""
        return self.segments[-1].raw_offset + self.segments[-1].raw_bytes


@dataclass(frozen=True, slots=True)
class Order:
    """One group of layers wanted from a source.

    Attributes:
        plan: Which segments.
        rows: One row of ``plan.raw_bytes`` per block, for the source's first ``len(rows)`` blocks.
        until: ``time.monotonic()`` value after which nobody waits.
    """

    plan: LayerPlan
    rows: Sequence[Bytes]
    until: float


class StreamSource(Protocol):
    """Consecutive blocks of a stream that one place holds."""

    name: str
    indices: range

    def start(self, order: Order) -> None:
        """Begin to bring one group of layers; one order at a time."""

    def collect(self) -> int:
        """Wait for what was started; returns how many leading blocks of the order are there."""

    def close(self) -> None:
        """Let go of whatever the source holds; idempotent."""


class ResidentSource:
    """Blocks in L1, pinned until :meth:`close`."""

    def __init__(self, name: str, l1: L1Cache, entries: Sequence[Entry], indices: range) -> None:
        self.name = name
        self.indices = indices
        self._l1 = l1
        self._entries: Sequence[Entry] = entries
        self._copied = 0

    def start(self, order: Order) -> None:
        """Copy at once: it is one memcpy per block."""
        begin = order.plan.segments[0].raw_offset
        for entry, row in zip(self._entries, order.rows, strict=False):
            np.copyto(row, self._l1.pool.payload(entry.slot)[begin : order.plan.raw_end])
        self._copied = len(order.rows)

    def collect(self) -> int:
        """Nothing to wait for."""
        return self._copied

    def close(self) -> None:
        """Unpin."""
        entries, self._entries = self._entries, ()
        self._l1.unpin(entries)


class TierSource:
    """Records in a tier, read and verified a few segments at a time by the tier's own threads."""

    def __init__(self, open_tier: OpenTier, key: KVCacheKey, indices: range) -> None:
        self.open_tier = open_tier
        self.name = open_tier.tier.name
        self.indices = indices
        self.key = key
        self.digests = key.digests[indices.start : indices.stop]
        self.tables: dict[int, SegmentTable] = {}
        """Verified heads of blocks of which something was read."""
        self._head_bytes = open_tier.reader.shelf.shape.own_head_bytes
        self._running: list[_Share] = []
        self._ordered = 0

    def start(self, order: Order) -> None:
        """Deal the blocks to the threads; a medium with threads of its own gets them in one call."""
        tier = self.open_tier.tier
        self._ordered = len(order.rows)
        threads = 1 if tier.backend.capabilities & Capability.PARALLEL else tier.workers.size
        self._running = [_Share(self, part, order) for part in strided(self._ordered, threads)]
        try:
            for share in self._running:
                tier.workers.submit(share.job)
        except BackendError as e:  # every thread is stuck: what was not submitted is not there
            tier.failed("get_ranges", e)

    def collect(self) -> int:
        """Wait until the deadline; what comes later writes into rows that nobody was given."""
        tier = self.open_tier.tier
        arrived: set[int] = set()
        for share in self._running:
            try:
                tier.workers.collect(share.job, share.call)
            except BackendTimeoutError as e:
                tier.failed("get_ranges", e)
            except Exception as e:  # noqa: BLE001 - border: a plugin's bug must not reach the engine
                tier.failed("get_ranges", PluginError(f"get_ranges of tier {tier.name!r}: {e!r}"))
            else:
                arrived |= share.delivered
        self._running = []
        return next((i for i in range(self._ordered) if i not in arrived), self._ordered)

    def ranges(self, part: Sequence[int], plan: LayerPlan) -> list[tuple[int, int]]:
        """Which bytes of each record hold a group; the first time the head comes along."""
        last = plan.first_segment + len(plan.segments) - 1
        sealed = MAX_SEAL_BYTES * (last + 1)  # if it is; a few bytes more cost nothing
        unknown = (0, self._head_bytes + plan.raw_end + sealed)
        tables = [self.tables.get(i) for i in part]
        return [unknown if t is None else (t.spans[plan.first_segment][0], t.spans[last][1]) for t in tables]

    def close(self) -> None:
        """Ask what still runs to stop; it keeps its memory until it ends."""
        for share in self._running:
            share.call.cancel()
        self._running = []


class _Share:
    """One backend call: one group of layers of some blocks."""

    def __init__(self, source: TierSource, part: Sequence[int], order: Order) -> None:
        self._source = source
        self._part = part
        self._order = order
        self._ranges = source.ranges(part, order.plan)
        self.call = source.open_tier.tier.call(order.until)
        self.delivered: set[int] = set()
        self.job: Job[None] = Job(self._read)

    def _read(self) -> None:
        source, call = self._source, self.call
        tier = source.open_tier.tier
        part = Part(source.key, [source.indices[i] for i in self._part])
        names = tier.guarded("epoch", lambda: tier.names_of(part, call))
        if names is None:
            return
        bad: list[BadRecord] = []

        def receive(k: int, view: memoryview) -> None:
            self._take(k, view, names[k], bad)

        tier.guarded("get_ranges", lambda: self._ask(names, receive))
        source.open_tier.reader.condemn(bad, in_worker=True)

    def _ask(self, names: Sequence[bytes], receive: Receive) -> list[ReadStatus]:
        tier = self._source.open_tier.tier
        statuses = tier.backend.get_ranges(names, self._ranges, receive, self.call)
        return tier.checked("get_ranges", statuses, len(names))

    def _take(self, k: int, view: memoryview, name: bytes, bad: list[BadRecord]) -> None:
        """Verify the segments in ``view`` and write them where they belong."""
        i = self._part[k]
        source, plan = self._source, self._order.plan
        decoder = source.open_tier.reader.shelf.decoder()
        table = source.tables.get(i)
        checksum = int.from_bytes(view[HEADER_BYTES - 8 : HEADER_BYTES], "little")
        try:
            if table is None:
                table = source.tables[i] = decoder.open_head(view, source.digests[i])
            checksum = table.header_checksum
            row, begin, at = self._order.rows[i], self._ranges[k][0], 0
            for index, segment in enumerate(plan.segments, plan.first_segment):
                start, stop = table.spans[index]
                opened = decoder.open_segment(table, index, view[start - begin : stop - begin])
                opened.write_into(row[at : at + segment.raw_bytes].data)
                at += segment.raw_bytes
        except CorruptRecordError as e:
            bad.append(BadRecord(name, checksum, e, self.call.run))
            return
        decoder.recycle()
        self.delivered.add(i)

"""Measures a tier by reads that nobody waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvstore.l2.landing import Landing
from kvstore.l2.part import Part
from kvstore.l2.reader import NO_ANSWER, leading_run
from kvstore.types import BlockStatus

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.keys import KVCacheKey
    from kvstore.l2.reader import TierReader

_MOST_BYTES: Final = 16 << 20  # what a read has in flight at once; enough for a bandwidth
_SHARES: Final = (8, 3, 1)  # an eighth, a third, all: sizes apart enough to tell latency from time per block


def sound(reader: TierReader, key: KVCacheKey) -> None:
    """Read the leading blocks of ``key`` as a get does, note how long that takes, and drop them.

    Three reads of different sizes, at most 16 MiB or one block.  Blocks until they end, so it belongs
    into a background thread; ends at the first one that brings nothing.
    """
    tier, most = reader.tier, max(1, _MOST_BYTES // reader.shelf.shape.block_bytes)
    n_blocks = min(len(key), most)
    for share in _SHARES:
        part = key[: -(-n_blocks // share)]
        began = time.perf_counter()
        run = len(part) if tier.direct or tier.asks_by_reading else tier.leading(part)
        statuses = read_and_drop(reader, Part(part, range(run))) if run else []
        delivered = leading_run(statuses)
        reader.note_read(delivered, time.perf_counter() - began, failed=bool(statuses) and statuses[0] in NO_ANSWER)
        if not delivered:
            return


def read_and_drop(reader: TierReader, part: Part) -> list[BlockStatus]:
    """Read and verify blocks into staging memory that is given back at once."""
    landing = Landing(reader.frames)
    call = reader.tier.call(leading_only=True)
    try:
        if not reader.tier.direct:
            return reader.begin(part, landing, call).finish()

        def sink(i: int, block: OpenBlock) -> None:
            block.write_into(landing.frame(i).block)

        return reader.direct(part, sink, call)
    finally:
        landing.release([i for i in range(len(part)) if i not in landing.abandoned])

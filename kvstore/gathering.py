"""Leading blocks of a key in memory of the cache, before it is known how many of them are wanted."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Self

from kvstore.fetch import Chunk, Fetch
from kvstore.served import L1, Served

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.keys import KVCacheKey
    from kvstore.l1.entry import Entry
    from kvstore.stack import OpenTier, Stack
    from kvstore.tensors import Bytes, Rows


class Gathered:
    """Verified blocks, pinned in L1 or held in staging memory until the end of a ``with`` block.

    Belongs to one thread.  Nothing is copied to a caller before :meth:`copy_to`.

    Args:
        stack: The open cache.
        key: The wanted blocks.
    """

    def __init__(self, stack: Stack, key: KVCacheKey) -> None:
        self.served = Served(key)
        self.blocks: list[Bytes] = []
        self._stack = stack
        self._entries: list[Entry] = []
        self._chunks: list[Chunk] = []

    def gather(self, until: float) -> int:
        """Walk L1 and the tiers in rounds, as every prefix read does; returns how many blocks there are."""
        served, l1, n = self.served, self._stack.l1, len(self.served.key)
        while len(self.blocks) < n:
            start = len(self.blocks)
            if l1 is not None:
                entries = l1.pin_leading(served.key.digests[start:])
                self._entries += entries
                self.blocks += [l1.pool.payload(entry.slot) for entry in entries]
                served.note(L1, start, len(entries))
            for open_tier in self._stack:
                at = len(self.blocks)
                if at < n and time.monotonic() < until and not served.useless(open_tier.tier.name, at):
                    self._fetch(open_tier, at, until)
                    served.note(open_tier.tier.name, at, len(self.blocks) - at)
            if len(self.blocks) == start:
                break
        return len(self.blocks)

    def _fetch(self, open_tier: OpenTier, start: int, until: float) -> None:
        with contextlib.closing(Fetch(self._stack, open_tier, self.served, until).leading(start)) as chunks:
            for chunk in chunks:
                self._chunks.append(chunk)
                self.blocks += [block.data for block in chunk.blocks]

    def copy_to(self, rows: Rows, start: int, n_blocks: int) -> None:
        """Copy the first ``n_blocks`` to the caller's rows from ``start`` on."""
        for i, data in enumerate(self.blocks[:n_blocks], start):
            rows.fill(i, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.blocks = []
        entries, self._entries = self._entries, []
        if self._stack.l1 is not None:
            self._stack.l1.unpin(entries)
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            chunk.let_go()

"""Chunks of one layout, and those of other shapes beside them with a header that says what they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvstore_lmcache.layout import HEADER_BYTES, ChunkLayout
from kvstore_lmcache.names import ChunkName
from kvstore_lmcache.store import ChunkStore
from kvstore_lmcache.stores import Stores

logger = logging.getLogger("kvstore.lmcache")

Allocate = Callable[[int, ChunkLayout], torch.Tensor | None]
"""Memory for the chunk of this index and layout, as flat ``uint8``; None when there is none."""


class ChunkShelf:
    """What one worker stores: whole chunks as they are, shorter ones with a header; thread-safe.

    Whole chunks all have one layout, so their bytes need no description and go into the caller's
    memory without a copy.  The last chunk of a prompt may be shorter; nobody knows its size before it
    is read, so it is stored with its layout in front, in a block as large as a whole chunk.

    Args:
        stores: Where caches come from.
        model: The model's name.
        layout: Layout of a whole chunk.
        chunk_tokens: Tokens of a whole chunk.
        partial: Whether shorter chunks are stored, too.

    Raises:
        KVStoreError: A cache cannot be opened.
    """

    def __init__(self, stores: Stores, model: str, layout: ChunkLayout, *, chunk_tokens: int, partial: bool) -> None:
        self.layout: Final = layout
        self._stores: Final = stores
        self._whole: Final[ChunkStore] = stores.open(model, layout.form(chunk_tokens))
        self._described: ChunkStore | None = None
        if partial:
            self._described = stores.open(model, layout.described_form(chunk_tokens))

    def leading(self, names: Sequence[ChunkName]) -> int:
        """How many chunks are there before the first that is not."""
        for i, found in enumerate(self._whole.contains(names)):
            if not found and not (self._described is not None and self._described.contains([names[i]])[0]):
                return i
        return len(names)

    def get(self, names: Sequence[ChunkName], allocate: Allocate) -> list[ChunkLayout | None]:
        """Copy chunks into memory that the caller allocates.

        Args:
            names: Chunks, in any order.
            allocate: Called at least once for each chunk that may be there; again, with another
                layout, for a chunk that turns out to be shorter.  What was allocated and is not
                delivered keeps its content, and is the caller's to free.

        Returns:
            For each chunk, the layout that was delivered into the memory allocated last, or None.
        """
        got: list[ChunkLayout | None] = [None] * len(names)
        places = {}
        for i in range(len(names)):
            memory = allocate(i, self.layout)
            if memory is None:
                break  # what follows cannot be used without this one
            places[i] = memory
        delivered = self._whole.get([names[i] for i in places], list(places.values()))
        for i, ok in zip(places, delivered, strict=True):
            got[i] = self.layout if ok else None
        missing = [i for i in places if got[i] is None]
        if missing and self._described is not None:
            self._get_described(self._described, [(i, names[i]) for i in missing], allocate, got)
        loaded = sum(layout is not None for layout in got)
        self._stores.count(loaded=loaded, missed=len(got) - loaded)
        return got

    def put(self, names: Sequence[ChunkName], chunks: Sequence[tuple[ChunkLayout, torch.Tensor]]) -> int:
        """Store chunks and return how many were stored.

        Args:
            names: Chunks, in any order.
            chunks: Layout and bytes (flat ``uint8``) of each.
        """
        whole = [i for i, (layout, _) in enumerate(chunks) if layout == self.layout]
        short = [i for i, (layout, _) in enumerate(chunks) if layout != self.layout and self._fits(layout)]
        stored = sum(self._whole.put([names[i] for i in whole], [chunks[i][1] for i in whole]))
        if short and self._described is not None:
            blocks = [_described(*chunks[i], self._described.chunk_bytes) for i in short]
            stored += sum(self._described.put([names[i] for i in short], blocks))
        unfit = len(chunks) - len(whole) - len(short)
        if unfit:
            self._refuse(unfit, next(layout for layout, _ in chunks if layout != self.layout))
        return stored

    def delete(self, name: ChunkName) -> bool:
        """Delete a chunk; whether it was there."""
        deleted = self._whole.delete([name])
        if self._described is not None:
            deleted += self._described.delete([name])
        return deleted > 0

    def _fits(self, layout: ChunkLayout) -> bool:
        return self._described is not None and 0 < layout.nbytes <= self.layout.nbytes

    def _refuse(self, chunks: int, layout: ChunkLayout) -> None:
        if self._stores.counters.unfit == 0:
            why = "is larger than a whole chunk" if self._described is not None else "needs save_unfull_chunk"
            logger.warning(
                "a chunk of layout %s is not stored: it %s (whole chunks are %s); counted from now on",
                layout.tag,
                why,
                self.layout.tag,
            )
        self._stores.count(unfit=chunks)

    @staticmethod
    def _get_described(
        store: ChunkStore, wanted: list[tuple[int, ChunkName]], allocate: Allocate, got: list[ChunkLayout | None]
    ) -> None:
        there = store.contains([name for _, name in wanted])
        for (i, name), found in zip(wanted, there, strict=True):
            if not found:
                continue
            block = torch.empty(store.chunk_bytes, dtype=torch.uint8)
            if not store.get([name], [block])[0]:
                continue
            layout = ChunkLayout.from_header(block[:HEADER_BYTES].numpy().tobytes())
            memory = allocate(i, layout)
            if memory is not None:
                memory.copy_(block[HEADER_BYTES : HEADER_BYTES + layout.nbytes])
                got[i] = layout


def _described(layout: ChunkLayout, chunk: torch.Tensor, block_bytes: int) -> torch.Tensor:
    # Zeros behind a short chunk compress to nothing.
    block = torch.zeros(block_bytes, dtype=torch.uint8)
    block[:HEADER_BYTES] = torch.frombuffer(bytearray(layout.to_header()), dtype=torch.uint8)
    block[HEADER_BYTES : HEADER_BYTES + layout.nbytes] = chunk
    return block

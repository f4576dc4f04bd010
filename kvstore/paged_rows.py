"""Paged blocks in host memory as rows: gathered from and scattered into their pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.paged import Ids, PagedBlocks, Strip
from kvstore.spec import BlockSpec

Bytes = npt.NDArray[np.uint8]

_STAGING_BYTES: Final = 4 << 20  # stays in the processor's caches; 16 MiB runs at 0.8 of it
_DIRECT_BYTES: Final = 16 << 10  # longer runs are copied one by one, once: see benchmarks/bench_paged.py


class PagedRows:
    """Pages in host memory; belongs to one call.

    Large pages are copied one by one.  For small ones that would cost more than the bytes: blocks
    go through a staging buffer, one indexed numpy copy per layer for all blocks in it.

    Args:
        paged: The pages, checked.
        strips: What a block is made of, all of one size.
        spec: The blocks' spec.
    """

    def __init__(self, paged: PagedBlocks, strips: Sequence[Strip], spec: BlockSpec) -> None:
        self._ids = paged.ids.reshape(len(paged), paged.pages_per_block)
        self._n_blocks = len(paged)
        self._nbytes = spec.nbytes
        self._arrays: list[npt.NDArray[Any]] = [_bytes_of(strip) for strip in strips]
        self._parts = (len(strips) * paged.pages_per_block, *self._arrays[0].shape[1:])
        self._direct = strips[0].run_bytes >= _DIRECT_BYTES
        self._capacity = max(1, min(_STAGING_BYTES // spec.nbytes, self._n_blocks))
        self._staging: Bytes | None = None
        self._items: list[npt.NDArray[Any]] = []
        self._scratch: Bytes | None = None
        self._staged: list[int] = []

    def __len__(self) -> int:
        return self._n_blocks

    # -- out of the pages

    def copy_to(self, i: int, slot: Bytes) -> None:
        """Copy block ``i`` into ``slot``."""
        for part, page in zip(slot.reshape(self._parts), self._pages(i), strict=True):
            np.copyto(part, page)

    def copy_each_to(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy many blocks."""
        if self._direct:
            for i, slot in zip(blocks, slots, strict=True):
                self.copy_to(i, slot)
            return
        staging = self._rows()
        for begin in range(0, len(blocks), self._capacity):
            chunk = blocks[begin : begin + self._capacity]
            ids = self._ids_of(chunk)
            for array, items in zip(self._items, self._staged_items(len(chunk)), strict=True):
                _gather(array, ids, items)
            for j, slot in enumerate(slots[begin : begin + len(chunk)]):
                np.copyto(slot.reshape(staging.shape[0], -1), staging[:, j])

    # -- into the pages

    def fill(self, i: int, data: Bytes) -> None:
        """Copy ``data`` into block ``i``, at the latest at :meth:`finish`."""
        if self._direct:
            for part, page in zip(data.reshape(self._parts), self._pages(i), strict=True):
                np.copyto(page, part)
            return
        if len(self._staged) == self._capacity:
            self.finish()
        staging = self._rows()
        np.copyto(staging[:, len(self._staged)], data.reshape(staging.shape[0], -1))
        self._staged.append(i)

    def fill_each(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Copy many blocks in."""
        for i, block in zip(blocks, data, strict=True):
            self.fill(i, block)

    def target(self, i: int) -> Bytes:
        """Scratch memory for block ``i``."""
        del i
        if self._scratch is None:
            self._scratch = np.empty(self._nbytes, np.uint8)
        return self._scratch

    def commit(self, i: int) -> None:
        """Block ``i`` is complete in its target."""
        self.fill(i, self.target(i))

    def finish(self) -> None:
        """Write what is staged into its pages."""
        if not self._staged:
            return
        ids = self._ids_of(self._staged)
        for array, items in zip(self._items, self._staged_items(len(self._staged)), strict=True):
            array[ids] = items
        self._staged.clear()

    # -- inner matters

    def _pages(self, i: int) -> list[Bytes]:
        """The pages of block ``i`` in the order of its bytes."""
        pages = self._ids[i].tolist()
        if len(pages) == 1:
            (page,) = pages
            return [array[page] for array in self._arrays]
        return [array[page] for array in self._arrays for page in pages]

    def _ids_of(self, blocks: Sequence[int]) -> Ids:
        ids: Ids = self._ids[np.asarray(blocks)].reshape(-1)
        return ids

    def _rows(self) -> Bytes:
        """The staging buffer: shape (strips, blocks, bytes of a strip in a block)."""
        if self._staging is None:
            per_strip = self._nbytes // len(self._arrays)
            self._staging = np.empty((len(self._arrays), self._capacity, per_strip), np.uint8)
            self._items = [_items(array) for array in self._arrays]
        return self._staging

    def _staged_items(self, n_blocks: int) -> list[npt.NDArray[Any]]:
        """The first ``n_blocks`` staged blocks of each strip, one item per run of a page."""
        shape = (n_blocks * self._ids.shape[1], *self._arrays[0].shape[1:])
        return [_items(strip[:n_blocks].reshape(shape)) for strip in self._rows()]


def _bytes_of(strip: Strip) -> npt.NDArray[Any]:
    return strip.pages.numpy().view(np.uint8)


def _gather(pages: npt.NDArray[Any], ids: Ids, items: npt.NDArray[Any]) -> None:
    if pages.flags.c_contiguous:
        np.take(pages, ids, axis=0, out=items, mode="clip")  # in one pass; the ids were checked
    else:
        items[:] = pages[ids]  # take would copy the whole tensor first


def _items(pages: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The last axis as one item, so that numpy copies it with one memcpy."""
    items: npt.NDArray[Any] = pages.view(np.dtype((np.void, pages.shape[-1])))[..., 0]
    return items

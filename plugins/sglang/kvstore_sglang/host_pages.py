"""Pages of a host pool as tensors: views of its memory where that can be, copies elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from kvstore.spec import BlockSpec
from kvstore_sglang.page_format import indices_per_page, is_addressed

Part: TypeAlias = tuple[int, int]
"""Address and length in bytes of a piece of a page."""


class Pages(Protocol):
    """Some pages of a pool, one tensor of ``spec.shape`` each."""

    def to_store(self) -> Sequence[torch.Tensor]:
        """The pages' content; may be the pool's own memory."""

    def to_fill(self) -> Sequence[torch.Tensor]:
        """Tensors to be written to; :meth:`filled` follows."""

    def filled(self, n_pages: int) -> None:
        """The first ``n_pages`` tensors of :meth:`to_fill` hold pages; bring them into the pool."""


class HostPages:
    """Gives access to the pages of one host pool; thread-safe as far as the pool is.

    With the page-first layouts a page is one or a few pieces of memory whose addresses the pool tells
    (``get_page_buffer_meta``); one piece, or K and V at a fixed distance, become views and no byte is
    copied twice.  Everything else goes through the pool's flat pages.

    Args:
        pool: A host pool of SGLang; must outlive this object.
        spec: What a page is, see :func:`kvstore_sglang.page_format.page_spec`.
    """

    def __init__(self, pool: Any, spec: BlockSpec) -> None:
        self._pool = pool
        self._spec = spec
        self._indices_per_page = indices_per_page(pool)
        self._addressed = is_addressed(pool)

    @property
    def indices_per_page(self) -> int:
        """Host indices that stand for one page."""
        return self._indices_per_page

    def select(self, host_indices: torch.Tensor) -> Pages:
        """The pages that begin at every ``indices_per_page``-th index.

        Args:
            host_indices: ``(n_pages * indices_per_page,)`` of whole pages.
        """
        parts = self._parts(host_indices)
        if parts is None:
            return _FlatPages(self._pool, self._spec, host_indices[:: self._indices_per_page].tolist())
        views = [_view(pieces, self._spec) for pieces in parts]
        if all(view is not None for view in views):
            return _ViewedPages([view for view in views if view is not None])
        return _GatheredPages(parts, self._spec)

    def _parts(self, host_indices: torch.Tensor) -> list[list[Part]] | None:
        """Where each page lies, or None when the pool cannot say."""
        if not self._addressed:
            return None
        try:
            addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        except (NotImplementedError, ValueError):
            self._addressed = False  # such as Mamba states with side tables: as flat pages, then
            return None
        n_pages = len(host_indices) // self._indices_per_page
        each = len(addresses) // n_pages
        if sum(sizes) != n_pages * self._spec.nbytes:
            msg = f"{n_pages} pages of {sum(sizes)} bytes; expected {self._spec.nbytes} a page, as at registration"
            raise ValueError(msg)
        pieces = list(zip(addresses, sizes, strict=True))
        return [_joined(pieces[i : i + each]) for i in range(0, n_pages * each, each)]


class _ViewedPages:
    """Pages whose tensors are the pool's memory."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views

    def to_store(self) -> Sequence[torch.Tensor]:
        return self._views

    def to_fill(self) -> Sequence[torch.Tensor]:
        return self._views

    def filled(self, n_pages: int) -> None:
        """Nothing to do: the pool was written to."""


class _GatheredPages:
    """Pages in pieces of different length."""

    def __init__(self, parts: Sequence[Sequence[Part]], spec: BlockSpec) -> None:
        self._parts = parts
        self._spec = spec
        self._room: Sequence[torch.Tensor] = ()

    def to_store(self) -> Sequence[torch.Tensor]:
        pages = self._empty()
        for page, parts in zip(pages, self._parts, strict=True):
            address = page.data_ptr()
            for source, nbytes in parts:
                ctypes.memmove(address, source, nbytes)
                address += nbytes
        return pages

    def to_fill(self) -> Sequence[torch.Tensor]:
        self._room = self._empty()
        return self._room

    def filled(self, n_pages: int) -> None:
        for page, parts in zip(self._room[:n_pages], self._parts, strict=False):
            address = page.data_ptr()
            for target, nbytes in parts:
                ctypes.memmove(target, address, nbytes)
                address += nbytes

    def _empty(self) -> Sequence[torch.Tensor]:
        return torch.empty(len(self._parts), *self._spec.shape, dtype=self._spec.torch_dtype()).unbind(0)


class _FlatPages:
    """Pages that the pool copies in and out."""

    def __init__(self, pool: Any, spec: BlockSpec, starts: Sequence[int]) -> None:
        self._pool = pool
        self._spec = spec
        self._starts = starts
        self._room: Sequence[torch.Tensor] = ()

    def to_store(self) -> Sequence[torch.Tensor]:
        return [as_block(self._pool.get_data_page(start, flat=True), self._spec) for start in self._starts]

    def to_fill(self) -> Sequence[torch.Tensor]:
        # Only the dtype of the pool's own empty pages is wanted: they would be zeroed, and pinned one by one.
        dtype = self._pool.get_dummy_flat_data_page().dtype
        room = torch.empty(len(self._starts), self._spec.nbytes, dtype=torch.uint8)
        self._room = [page.view(dtype) for page in room]
        return [as_block(page, self._spec) for page in self._room]

    def filled(self, n_pages: int) -> None:
        for start, page in zip(self._starts[:n_pages], self._room, strict=False):
            self._pool.set_from_flat_data_page(start, page)


def as_block(page: torch.Tensor, spec: BlockSpec) -> torch.Tensor:
    """A flat page as a block of the spec, sharing its memory when it is contiguous.

    Raises:
        ValueError: The page has another size.
    """
    flat = page.contiguous().reshape(-1)
    if flat.nbytes != spec.nbytes:
        msg = f"a page of {flat.nbytes} bytes; expected {spec.nbytes}, as the pool's pages were when it was registered"
        raise ValueError(msg)
    return flat.view(spec.torch_dtype()).view(spec.shape)


def _joined(pieces: Sequence[Part]) -> list[Part]:
    """Pieces that follow one another in memory made one."""
    joined: list[Part] = []
    for address, nbytes in pieces:
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((int(address), int(nbytes)))
    return joined


def _view(parts: Sequence[Part], spec: BlockSpec) -> torch.Tensor | None:
    """A tensor of the spec over one piece of memory, or over K and V at a distance; None when neither."""
    (first, nbytes), (last, last_nbytes) = parts[0], parts[-1]
    distance = last - first
    if len(parts) == 1:
        return _memory(first, nbytes, spec).view(spec.shape) if nbytes == spec.nbytes else None
    halves = len(parts) == spec.shape[0] == 2 and nbytes == last_nbytes == spec.nbytes // 2
    if not halves or distance < nbytes or distance % spec.itemsize:
        return None
    both = _memory(first, distance + nbytes, spec)
    return both.as_strided((2, nbytes // spec.itemsize), (distance // spec.itemsize, 1)).view(spec.shape)


def _memory(address: int, nbytes: int, spec: BlockSpec) -> torch.Tensor:
    """The memory from ``address`` on, which belongs to the pool."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=spec.torch_dtype())

"""Handles: blocks that a caller fills, reads or gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch

from kvstore.compat.aibrix.regions import ExternalMemoryRegion, MemoryRegion
from kvstore.compat.aibrix.spec import KVCacheBlockLayout, KVCacheBlockSpec
from kvstore.errors import NotSupportedError


class KVCacheHandle(ABC):
    """Blocks whose memory the caller may use until he releases the handle, or hands it to ``put``."""

    @property
    @abstractmethod
    def memory_regions(self) -> Sequence[MemoryRegion]:
        """One region per block."""

    @property
    @abstractmethod
    def memory_region_type(self) -> type[MemoryRegion]:
        """Class of the regions."""

    @abstractmethod
    def to_tensors(self) -> Sequence[torch.Tensor]:
        """One tensor per block, not copied."""

    @abstractmethod
    def release(self) -> None:
        """Give one reference of each block back; afterwards the tensors are invalid."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Give back the blocks behind the first ``length``."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""


class MemoryRegionKVCacheHandle(KVCacheHandle):
    """A handle with one region per block.

    Args:
        block_dtype: Dtype of a block.
        block_shape: Its shape.
        mrs: The regions, at least one, of one class.

    Raises:
        ValueError: There is no region, or they are of several classes.
    """

    def __init__(self, block_dtype: torch.dtype, block_shape: Sequence[int], mrs: Sequence[MemoryRegion]) -> None:
        kinds = set(map(type, mrs))
        if len(kinds) != 1:
            got = sorted(kind.__name__ for kind in kinds)
            msg = f"a handle got regions of the classes {got}; expected at least one region, and one class"
            raise ValueError(msg)
        self._block_dtype = block_dtype
        self._block_shape = tuple(block_shape)
        self._mrs = mrs

    @property
    def memory_regions(self) -> Sequence[MemoryRegion]:
        """One region per block."""
        return self._mrs

    @property
    def memory_region_type(self) -> type[MemoryRegion]:
        """Class of the regions."""
        return type(self._mrs[0])

    def to_tensors(self) -> Sequence[torch.Tensor]:
        """One tensor per block, not copied."""
        return MemoryRegion.to_tensors(self._mrs, self._block_dtype, self._block_shape)

    def release(self) -> None:
        """Give one reference of each block back."""
        for region in self._mrs:
            region.ref_down()

    def truncate(self, length: int) -> None:
        """Give back the blocks behind the first ``length``."""
        for region in self._mrs[length:]:
            region.ref_down()
        self._mrs = self._mrs[:length]

    def __len__(self) -> int:
        return len(self._mrs)

    @staticmethod
    def create(
        blocks: Sequence[torch.Tensor],
        block_spec: KVCacheBlockSpec,
        select: Sequence[tuple[int, int]],
        on_mr_release: Callable[[torch.Tensor, int, int], None] | None = None,
    ) -> KVCacheHandle:
        """Make a handle over the caller's own memory.

        Args:
            blocks: Contiguous tensors.
            block_spec: What a block looks like.
            select: For each block of the handle, which tensor and which index of its first axis it
                begins at.
            on_mr_release: Called with slab, address and length of each block that is given back.

        Raises:
            ValueError: There is no tensor, or cache and engine have blocks of different sizes in a
                layout that cannot be cut by tokens.
        """
        if not blocks:
            msg = "create() got no tensors; expected at least one"
            raise ValueError(msg)
        one_size = block_spec.block_ntokens == block_spec.engine_block_ntokens
        if not one_size and block_spec.block_layout is not KVCacheBlockLayout.NCLD:
            msg = (
                f"cache blocks of {block_spec.block_ntokens} tokens over engine blocks of "
                f"{block_spec.engine_block_ntokens} need the layout NCLD; got {block_spec.block_layout.name}"
            )
            raise ValueError(msg)
        regions = []
        for index, offset in select:
            slab = blocks[index].view(-1).view(torch.uint8)
            addr = blocks[index][offset].data_ptr() - slab.data_ptr()
            regions.append(ExternalMemoryRegion(slab, addr, block_spec.block_nbytes, on_mr_release))
        return MemoryRegionKVCacheHandle(block_spec.block_dtype, block_spec.block_shape, regions)


class GDRKVCacheHandle(KVCacheHandle):
    """GPUDirect handle, which is not offered: the name is there for ``isinstance``.

    Raises:
        NotSupportedError: Always; ask the cache's ``feature`` first.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse."""
        cls.create(*args, **kwargs)

    @staticmethod
    def create(*args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        del args, kwargs
        msg = "GPUDirect handles are not offered (feature.gdr_put and feature.gdr_get are False); use allocate_for()"
        raise NotSupportedError(msg)

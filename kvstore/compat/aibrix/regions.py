"""Reference-counted memory of one block each: what handles are made of."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch


class RefCountedObj(ABC):
    """Something that ends when its last reference is given back; starts with one.

    Attributes:
        ref_count: References now.
    """

    def __init__(self) -> None:
        self.ref_count = 1
        self._lock = threading.Lock()

    def ref_up(self) -> None:
        """Take one more reference."""
        with self._lock:
            self.ref_count += 1

    def ref_down(self) -> None:
        """Give one reference back.

        Raises:
            ValueError: There is none left.
        """
        with self._lock:
            if self.ref_count == 0:
                msg = f"{type(self).__name__} has no reference left to give back; release a handle once"
                raise ValueError(msg)
            self.ref_count -= 1
            last = self.ref_count == 0
        if last:
            self.destroy_unsafe()

    @abstractmethod
    def destroy_unsafe(self) -> None:
        """Called once, by whoever gave the last reference back."""


class MemoryRegion(RefCountedObj):
    """A block's contiguous bytes.

    Args:
        slab: Flat uint8 tensor that holds them.
        addr: First byte within it.
        length: Bytes.

    Attributes:
        slab: As given, like ``addr`` and ``length``.
        capacity: Bytes that there is room for.
    """

    def __init__(self, slab: torch.Tensor, addr: int, length: int) -> None:
        super().__init__()
        self.slab = slab
        self.addr = addr
        self.length = length
        self.capacity = length

    @property
    def block_nbytes(self) -> int:
        """Bytes of the block."""
        return self.length

    @staticmethod
    def use_compact_layout() -> bool:
        """Whether a region holds the block and nothing else; always."""
        return True

    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self.slab.data_ptr() + self.addr

    def to_tensor(self, mr_dtype: torch.dtype | None = None, mr_shape: Sequence[int] | None = None) -> torch.Tensor:
        """The bytes as a tensor, not copied; flat uint8 unless dtype and shape are given."""
        tensor = self._bytes()
        if mr_dtype is not None:
            tensor = tensor.view(mr_dtype)
        return tensor if mr_shape is None else tensor.view(*mr_shape)

    @staticmethod
    def to_tensors(
        mrs: Sequence[MemoryRegion] | None,
        mr_dtype: torch.dtype | None = None,
        mr_shape: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """:meth:`to_tensor` of each."""
        return [mr.to_tensor(mr_dtype, mr_shape) for mr in mrs or ()]

    def tobytes(self) -> bytes:
        """A copy of the bytes."""
        return self._bytes().cpu().numpy().tobytes()

    def fill(self, data: bytes) -> None:
        """Replace the bytes.

        Raises:
            ValueError: ``data`` has another length.
        """
        if len(data) != self.length:
            msg = f"fill() got {len(data)} bytes; expected {self.length}"
            raise ValueError(msg)
        self._bytes().copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def copy(self, mr: MemoryRegion) -> None:
        """Replace the bytes by those of another region.

        Raises:
            ValueError: There is no room for them.
        """
        if mr.length > self.capacity:
            msg = f"copy() got {mr.length} bytes; there is room for {self.capacity}"
            raise ValueError(msg)
        self.length = mr.length
        self._bytes().copy_(mr._bytes())

    def _bytes(self) -> torch.Tensor:
        return self.slab[self.addr : self.addr + self.length]

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.length} bytes, {self.ref_count} references)"


class ExternalMemoryRegion(MemoryRegion):
    """Memory of the caller.

    Args:
        slab: As for :class:`MemoryRegion`, like ``addr`` and ``length``.
        addr: See there.
        length: See there.
        on_release: Called with slab, address and length when the last reference is given back.
        depends_on: Kept alive with the region.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        addr: int,
        length: int,
        on_release: Callable[[torch.Tensor, int, int], None] | None = None,
        depends_on: Any = None,
    ) -> None:
        super().__init__(slab, addr, length)
        self._on_release = on_release
        self.depends_on = depends_on

    def destroy_unsafe(self) -> None:
        """Tell the caller."""
        if self._on_release is not None:
            self._on_release(self.slab, self.addr, self.length)


class Hold:
    """Memory of the store that the regions of one handle share.

    Args:
        tensors: Gives one tensor per block; asked when the first is looked at.
        release: Gives all blocks back; called once, after the last region ended.
        shared: Whether others see the same bytes, so that nobody may write into them.
    """

    def __init__(
        self, tensors: Callable[[], Sequence[torch.Tensor]], release: Callable[[], None], *, shared: bool
    ) -> None:
        self._tensors = tensors
        self._release = release
        self.shared = shared
        self._lock = threading.Lock()
        self._live = 0

    def regions(self, n_blocks: int, nbytes: int) -> list[ManagedMemoryRegion]:
        """Make one region per block, each with one reference."""
        self._live = n_blocks
        return [ManagedMemoryRegion(self, position, nbytes) for position in range(n_blocks)]

    def tensor(self, position: int) -> torch.Tensor:
        """The block at ``position``."""
        return self._tensors()[position]

    def drop(self) -> None:
        """One region ended."""
        with self._lock:
            self._live -= 1
            last = self._live == 0
        if last:
            self._release()


class ManagedMemoryRegion(MemoryRegion):
    """A block in memory of the store: one that is pinned, or one that is reserved and not stored yet.

    The pins of a handle come back together, when its last region ends.

    Args:
        hold: What the handle's regions share.
        position: Which of its blocks this is.
        nbytes: Bytes of a block.
    """

    def __init__(self, hold: Hold, position: int, nbytes: int) -> None:
        # Not the base's: thousands are made at once, and nobody may ever ask for the slab.
        RefCountedObj.__init__(self)
        self.hold = hold
        self.position = position
        self.addr = 0
        self.length = nbytes
        self.capacity = nbytes

    @property
    def slab(self) -> torch.Tensor:  # type: ignore[override]  # an attribute of others
        """The block's bytes, flat."""
        return self.hold.tensor(self.position).reshape(-1).view(torch.uint8)

    @property
    def is_sealed(self) -> bool:
        """Whether the region was put; the region of a stored block counts as one."""
        return True

    def to_tensor(self, mr_dtype: torch.dtype | None = None, mr_shape: Sequence[int] | None = None) -> torch.Tensor:
        """The block as a tensor, not copied."""
        tensor = self.hold.tensor(self.position)
        if mr_dtype == tensor.dtype and mr_shape is not None and tuple(mr_shape) == tuple(tensor.shape):
            return tensor
        return super().to_tensor(mr_dtype, mr_shape)

    def destroy_unsafe(self) -> None:
        """Tell the handle's other regions."""
        self.hold.drop()

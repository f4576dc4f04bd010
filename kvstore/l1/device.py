"""Memory that blocks live in: the pool contract, and a pool of torch memory on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kvstore.errors import CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    import torch

BufferT = TypeVar("BufferT")

_DEVICE_ALIGN: Final = 512  # bytes; what CUDA's own allocator aligns to


class BlockPool(ABC, Generic[BufferT]):
    """Fixed-size block slots in one preallocated piece of memory.

    Allocation is O(1) and not thread-safe: the L1 index guards it with its own lock.  Copying is
    safe from any thread as long as the caller holds the slot.

    Args:
        block_bytes: Bytes of one block, at least 1.
        n_slots: Slots, at least 1.
    """

    def __init__(self, block_bytes: int, n_slots: int) -> None:
        self.block_bytes = block_bytes
        self.n_slots = n_slots
        self._freed: list[int] = []
        self._untouched = 0  # slots from here on were never given out
        self._taken = bytearray(n_slots)

    def allocate(self) -> int | None:
        """Take a free slot, a recently freed one first because its pages are there; None if full."""
        if self._freed:
            slot = self._freed.pop()
        elif self._untouched < self.n_slots:
            slot = self._untouched
            self._untouched += 1
        else:
            return None
        self._taken[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: The slot is not taken; its bytes may belong to somebody else already.
        """
        if not self._taken[slot]:
            msg = f"slot {slot} is freed twice; each slot taken by allocate() is freed once"
            raise ValueError(msg)
        self._taken[slot] = 0
        self._freed.append(slot)

    @property
    def n_free(self) -> int:
        """Slots that ``allocate`` can still give out."""
        return self.n_slots - self._untouched + len(self._freed)

    @abstractmethod
    def payload(self, slot: int) -> BufferT:
        """Return the block's ``block_bytes`` bytes, zero-copy: shape ``(block_bytes,)``, uint8."""

    @abstractmethod
    def copy_in(self, slot: int, source: torch.Tensor) -> None:
        """Copy ``source`` into the slot; done when this returns.

        Args:
            slot: A slot held by the caller.
            source: Shape ``(block_bytes,)``, uint8, contiguous, on any device.
        """

    @abstractmethod
    def copy_out(self, slot: int, target: torch.Tensor) -> None:
        """Copy the slot's block into ``target``, which is like ``source`` of :meth:`copy_in`."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back as soon as no view needs it; idempotent."""


class TorchDevicePool(BlockPool["torch.Tensor"]):
    """Blocks in one torch allocation on ``device``.

    Args:
        device: Torch device, such as ``"cuda:0"``; ``"cpu"`` works too.
        block_bytes: Bytes of one block.
        capacity_bytes: Hard total of the allocation.

    Raises:
        ConfigError: There is no such device here.
        CapacityError: Less than one block fits, or the device has not that much memory.
    """

    def __init__(self, device: str, block_bytes: int, capacity_bytes: int) -> None:
        import torch

        place = resolve_device(device)
        self._stride = -(-block_bytes // _DEVICE_ALIGN) * _DEVICE_ALIGN
        n_slots = count_slots(capacity_bytes, self._stride, option="l1.device_capacity")
        try:
            memory = torch.empty(n_slots * self._stride, dtype=torch.uint8, device=place)
        except RuntimeError as e:  # torch.OutOfMemoryError is one; the CPU allocator raises it bare
            nbytes = n_slots * self._stride
            msg = f"{device} cannot give {nbytes} bytes for the L1 device pool ({e}); lower l1.device_capacity"
            raise CapacityError(msg) from e
        super().__init__(block_bytes, n_slots)
        self._memory: torch.Tensor | None = memory

    def payload(self, slot: int) -> torch.Tensor:
        """Return the block's bytes as a uint8 tensor of shape ``(block_bytes,)`` on the device."""
        return self._open()[slot * self._stride :][: self.block_bytes]

    def rows(self) -> torch.Tensor:
        """Return all slots' block bytes as one uint8 tensor of shape ``(n_slots, block_bytes)``."""
        return self._open().view(self.n_slots, self._stride)[:, : self.block_bytes]

    def copy_in(self, slot: int, source: torch.Tensor) -> None:
        """Copy ``source`` into the slot."""
        self.payload(slot).copy_(source)

    def copy_out(self, slot: int, target: torch.Tensor) -> None:
        """Copy the slot's block into ``target``."""
        target.copy_(self.payload(slot))

    def close(self) -> None:
        """Drop the allocation; torch frees it with its last view."""
        self._memory = None

    def _open(self) -> torch.Tensor:
        if self._memory is None:
            msg = "the L1 device pool is closed"
            raise ClosedError(msg)
        return self._memory


def count_slots(capacity_bytes: int, stride_bytes: int, *, option: str = "l1.capacity") -> int:
    """How many slots of ``stride_bytes`` fit into ``capacity_bytes``.

    Raises:
        CapacityError: Not even one.
    """
    n_slots = capacity_bytes // stride_bytes
    if n_slots < 1:
        msg = (
            f"{option} is {capacity_bytes} bytes but one block slot takes {stride_bytes} bytes; "
            f"raise {option} to at least {stride_bytes}"
        )
        raise CapacityError(msg)
    return n_slots


def resolve_device(device: str) -> torch.device:
    """Check that ``device`` exists in this process.

    Raises:
        ConfigError: The name is no device, or the device is not there; the message says which.
    """
    import torch

    try:
        place: Any = torch.device(device)
    except RuntimeError as e:
        msg = f"l1.device is {device!r}; expected 'cpu' or a torch device such as 'cuda:0'"
        raise ConfigError(msg) from e
    if place.type == "cuda":
        if not torch.cuda.is_available():
            msg = (
                f"l1.device is {device!r} but torch.cuda is not available here "
                "(no driver, or a CPU build of torch); use 'cpu'"
            )
            raise ConfigError(msg)
        if (place.index or 0) >= torch.cuda.device_count():
            n_devices = torch.cuda.device_count()
            msg = f"l1.device is {device!r} but this machine has {n_devices} CUDA devices, counted from cuda:0"
            raise ConfigError(msg)
    result: torch.device = place
    return result


def usable(place: torch.device) -> bool:
    """Whether this process may use the device: a child that was forked after CUDA was initialised may not."""
    import torch

    return place.type != "cuda" or not torch.cuda._is_in_bad_fork()  # noqa: SLF001 - torch has no public name for it

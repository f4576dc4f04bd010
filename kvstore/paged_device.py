"""Blocks in the memory of an accelerator as rows: moved in chunks beside the caller's work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.l1.streams import STAGE_BYTES, Lane, Mark, Stage
from kvstore.paged import Ids, Strip

if TYPE_CHECKING:
    from kvstore.l1.device_cache import DeviceCache
    from kvstore.spec import BlockSpec

Bytes = npt.NDArray[np.uint8]

_BEHIND: Final = 1  # chunks on their way to the host while the next one is gathered


class Pages(Protocol):
    """A caller's blocks on a device; called within the lane's work."""

    def gather(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copy blocks into ``rows`` (n, nbytes), uint8."""

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copy ``rows`` into blocks."""


class StripPages:
    """Pages of one tensor per layer: one indexed copy per layer for all blocks of a chunk.

    Args:
        strips: What a block is made of, all of one size.
        ids: Page numbers, shape (blocks, pages per block).
        lane: Of the pages' device.
    """

    def __init__(self, strips: Sequence[Strip], ids: Ids, lane: Lane) -> None:
        self._strips = strips
        self._ids = ids
        self._lane = lane
        self._step = strips[0].page_bytes * ids.shape[1]

    def gather(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """One ``index_select`` per strip."""
        ids = self._upload(blocks)
        for k, strip in enumerate(self._strips):
            part = rows[:, k * self._step : (k + 1) * self._step]
            pages = strip.pages.index_select(0, ids)
            part.copy_(pages.view(len(blocks), -1).view(torch.uint8))

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """One ``index_copy_`` per strip."""
        ids = self._upload(blocks)
        for k, strip in enumerate(self._strips):
            part = rows[:, k * self._step : (k + 1) * self._step].contiguous()
            strip.pages.index_copy_(0, ids, part.view(strip.pages.dtype).view(len(ids), *strip.pages.shape[1:]))

    def _upload(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._lane.upload(torch.from_numpy(self._ids[np.asarray(blocks)].reshape(-1)))


class TensorPages:
    """Blocks in tensors of their own.

    Args:
        tensors: One per block.
        spec: Their spec.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], spec: BlockSpec) -> None:
        self._tensors = tensors
        self._spec = spec

    def gather(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """One copy per block."""
        for i, row in zip(blocks, rows, strict=True):
            self._view(row).copy_(self._tensors[i])

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """One copy per block."""
        for i, row in zip(blocks, rows, strict=True):
            self._tensors[i].copy_(self._view(row))

    def _view(self, row: torch.Tensor) -> torch.Tensor:
        return row.view(self._spec.torch_dtype()).view(self._spec.shape)


@dataclass(frozen=True, slots=True)
class Keep:
    """Slots of a device pool that blocks are copied into on their way.

    Attributes:
        cache: The pool.
        slots: By block index.
    """

    cache: DeviceCache
    slots: dict[int, int]


class DeviceRows:
    """A caller's blocks on an accelerator; belongs to one call and its thread.

    What the caller's stream did before the call is done before its blocks are touched.  A snapshot is
    complete when :meth:`copy_each_to` returns.  What is filled in is complete for the work that the
    caller enqueues after :meth:`finish`; nobody waits for it on the host.

    Args:
        pages: The blocks.
        n_blocks: How many.
        nbytes: Bytes of a block.
        lane: Of their device.
    """

    def __init__(self, pages: Pages, n_blocks: int, nbytes: int, lane: Lane) -> None:
        self.lane = lane
        self._pages = pages
        self._n_blocks = n_blocks
        self._nbytes = nbytes
        self._caller = lane.caller()
        self._capacity = max(1, STAGE_BYTES // nbytes)
        self._stage: Stage | None = None
        self._staged: list[int] = []
        self._scratch: Bytes | None = None
        self._following = False

    def __len__(self) -> int:
        return self._n_blocks

    # -- to the host

    def copy_to(self, i: int, slot: Bytes) -> None:
        """Copy block ``i`` into ``slot``."""
        self.copy_each_to([i], [slot])

    def copy_each_to(self, blocks: Sequence[int], slots: Sequence[Bytes], keep: Keep | None = None) -> None:
        """Copy blocks into slots, and into the device pool too: gathered once, all there on return."""
        self._follow()
        under_way: deque[tuple[Stage, Sequence[Bytes], bool]] = deque()
        direct = bool(slots) and self.lane.pinned(torch.from_numpy(slots[0]))
        for part in self._chunks(blocks):
            stage, targets = self._borrow(), slots[part.start : part.stop]
            chunk = blocks[part.start : part.stop]
            near = self._rows(stage.near, len(chunk))
            with self.lane.work():
                self._pages.gather(chunk, near)
                self._keep(chunk, near, keep)
            if direct:
                stage.free = self.lane.down((torch.from_numpy(t), row) for t, row in zip(targets, near, strict=True))
            else:
                stage.free = self.lane.down([(self._rows(stage.host, len(chunk)), near)])
            under_way.append((stage, targets, direct))
            if len(under_way) > _BEHIND:
                self._arrive(*under_way.popleft())
        while under_way:
            self._arrive(*under_way.popleft())

    def _arrive(self, stage: Stage, targets: Sequence[Bytes], direct: bool) -> None:
        if stage.free is not None:
            stage.free.wait()
            stage.free = None
        if not direct:
            for target, row in zip(targets, self._rows(stage.host, len(targets)).numpy(), strict=True):
                np.copyto(target, row)
        self.lane.give_back(stage)

    # -- to the device

    def fill(self, i: int, data: Bytes) -> None:
        """Copy ``data`` into block ``i``, at the latest at :meth:`finish`; ``data`` is free on return."""
        if self._stage is None:
            self._stage = self._writable()
        np.copyto(self._rows(self._stage.host, self._capacity)[len(self._staged)].numpy(), data)
        self._staged.append(i)
        if len(self._staged) == self._capacity:
            self._flush()

    def fill_each(self, blocks: Sequence[int], data: Sequence[Bytes], keep: Keep | None = None) -> None:
        """Copy ``data`` into blocks and into the device pool; ``data`` is free on return.

        Page-locked memory is read by the device itself.
        """
        self._flush()
        if not data:
            return
        self._follow()
        direct, last = self.lane.pinned(torch.from_numpy(data[0])), None
        for part in self._chunks(blocks):
            chunk, sources = blocks[part.start : part.stop], data[part.start : part.stop]
            if direct:
                stage = self._borrow()
                near = self._rows(stage.near, len(chunk))
                pairs = [(row, torch.from_numpy(source)) for row, source in zip(near, sources, strict=True)]
                last = self.lane.up(pairs, stage.free)
            else:
                stage = self._writable()
                for row, source in zip(self._rows(stage.host, len(chunk)).numpy(), sources, strict=True):
                    np.copyto(row, source)
                self._send(stage, len(chunk))
            self._scatter(stage, chunk, keep)
        if last is not None:
            last.wait()

    def fill_from(self, cache: DeviceCache, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks that lie in the device pool; they are read when enqueued work before has run."""
        self._flush()
        self._follow()
        for part in self._chunks(blocks):
            numbers = self.lane.upload(torch.tensor(slots[part.start : part.stop], dtype=torch.int64))
            with self.lane.work():
                self._pages.scatter(blocks[part.start : part.stop], cache.read(numbers))
        self.lane.lead(self._caller)

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
        """Send what is staged; the caller's stream sees all of it from here on."""
        self._flush()

    def _flush(self) -> None:
        stage, self._stage = self._stage, None
        if stage is None:
            return
        chunk, self._staged = self._staged, []
        self._follow()
        self._send(stage, len(chunk))
        self._scatter(stage, chunk, None)

    # -- inner matters

    def _send(self, stage: Stage, n_blocks: int) -> Mark:
        return self.lane.up([(self._rows(stage.near, n_blocks), self._rows(stage.host, n_blocks))], stage.free)

    def _scatter(self, stage: Stage, chunk: Sequence[int], keep: Keep | None) -> None:
        near = self._rows(stage.near, len(chunk))
        with self.lane.work():
            self._pages.scatter(chunk, near)
            self._keep(chunk, near, keep)
        stage.free = self.lane.mark()
        self.lane.lead(self._caller)
        self.lane.give_back(stage)

    def _keep(self, chunk: Sequence[int], near: torch.Tensor, keep: Keep | None) -> None:
        if keep is None:
            return
        kept = [(j, keep.slots[i]) for j, i in enumerate(chunk) if i in keep.slots]
        if not kept:
            return
        places, slots = self.lane.upload(torch.tensor(kept, dtype=torch.int64).t().contiguous())
        keep.cache.write(slots, near if len(kept) == len(chunk) else near.index_select(0, places))

    def _follow(self) -> None:
        """Begin after what the caller's stream has been given; once, for a call enqueues nothing there itself."""
        if not self._following:
            self._following = True
            self.lane.follow(self._caller)

    def _borrow(self) -> Stage:
        return self.lane.borrow(self._capacity * self._nbytes)

    def _writable(self) -> Stage:
        """A stage whose host half can be written now."""
        stage = self._borrow()
        if stage.free is not None:
            stage.free.wait()
            stage.free = None
        return stage

    def _rows(self, buffer: torch.Tensor, n_blocks: int) -> torch.Tensor:
        return buffer[: n_blocks * self._nbytes].view(n_blocks, self._nbytes)

    def _chunks(self, blocks: Sequence[int]) -> Iterator[range]:
        for start in range(0, len(blocks), self._capacity):
            yield range(start, min(start + self._capacity, len(blocks)))

"""Copies between host and device memory beside the caller's work: side streams, events, staging buffers."""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch

STAGE_BYTES: Final = 16 << 20
"""Size of a staging buffer: moving it takes 0.3 ms on PCIe 5, starting a copy some microseconds."""

_MAX_IDLE: Final = 3  # one that is filled, one on the bus, one that is scattered

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Destination and source of copies."""


class Mark(ABC):
    """A point in the work of a lane."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until everything before it has ended."""


@dataclass(slots=True, eq=False)
class Stage:
    """A pair of buffers of the same size, one on the device and one on the host.

    Attributes:
        near: On the device, flat uint8.
        host: In host memory, page-locked where possible, flat uint8.
        free: When both may be written again; None for at once.
    """

    near: torch.Tensor
    host: torch.Tensor
    free: Mark | None = None


class Lane(ABC):
    """Where copies to and from one device run; thread-safe.

    The caller's stream is what the calling thread of :meth:`caller` had as its current one.  Work
    runs on a stream of its own, in the order in which it was enqueued by any thread, so memory that
    only the lane touches needs no other protection.  Transfers over the bus run on a third stream
    beside it.  The whole device is never waited for.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._idle: deque[Stage] = deque()

    # -- order

    @abstractmethod
    def caller(self) -> Any:
        """The current stream of the calling thread."""

    @abstractmethod
    def follow(self, caller: Any) -> None:
        """Later work begins after what the caller has enqueued by now."""

    @abstractmethod
    def lead(self, caller: Any) -> None:
        """What the caller enqueues from now on begins after the work so far."""

    @abstractmethod
    def work(self) -> AbstractContextManager[Any]:
        """A ``with`` block whose kernels and allocations are the lane's work."""

    @abstractmethod
    def mark(self) -> Mark:
        """The end of the work so far."""

    # -- the bus

    @abstractmethod
    def down(self, pairs: Pairs) -> Mark:
        """Copy from the device to the host, after the work so far; returns when that ends."""

    @abstractmethod
    def up(self, pairs: Pairs, after: Mark | None) -> Mark:
        """Copy from the host to the device, after ``after``; later work begins when that ends."""

    @abstractmethod
    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A small host tensor on the device, for later work."""

    @abstractmethod
    def pinned(self, host: torch.Tensor) -> bool:
        """Whether the device can copy to and from this host memory on its own."""

    @abstractmethod
    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Uint8 host memory, page-locked if the system gives it."""

    # -- staging buffers

    def borrow(self, nbytes: int) -> Stage:
        """A stage of at least ``nbytes``; :meth:`give_back` it, or leave it to the garbage collector."""
        with self._lock:
            fits = [stage for stage in self._idle if stage.near.numel() >= nbytes]
            ready = next((stage for stage in fits if stage.free is None or stage.free.done()), None)
            if len(self._idle) >= _MAX_IDLE and not fits:
                self._idle.popleft()  # too small for this cache's blocks
            elif len(self._idle) >= _MAX_IDLE:
                ready = ready or fits[0]
            if ready is not None:
                self._idle.remove(ready)
                return ready
        size = max(nbytes, STAGE_BYTES)
        with self.work():  # so that the allocation belongs to the lane's stream
            near = torch.empty(size, dtype=torch.uint8, device=self.device)
        return Stage(near, self.host_buffer(size), self.mark())  # its memory may come from work under way

    def give_back(self, stage: Stage) -> None:
        """Keep a stage for the next call; ``stage.free`` says when it may be written."""
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(stage)


class _Now(Mark):
    """What has ended already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class InlineLane(Lane):
    """A lane without streams: everything has happened when a call returns.  For host memory.

    Args:
        device: Of the tensors.
        direct: What :meth:`pinned` says.
    """

    def __init__(self, device: torch.device, *, direct: bool = False) -> None:
        super().__init__(device)
        self._direct = direct

    def caller(self) -> None:
        """No stream."""

    def follow(self, caller: Any) -> None:
        """In order anyway."""

    def lead(self, caller: Any) -> None:
        """In order anyway."""

    def work(self) -> AbstractContextManager[Any]:  # noqa: D102 - as in Lane
        return contextlib.nullcontext()

    def mark(self) -> Mark:  # noqa: D102 - as in Lane
        return _Now()

    def down(self, pairs: Pairs) -> Mark:  # noqa: D102 - as in Lane
        for target, source in pairs:
            target.copy_(source)
        return _Now()

    def up(self, pairs: Pairs, after: Mark | None) -> Mark:  # noqa: D102 - as in Lane
        del after
        return self.down(pairs)

    def upload(self, values: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as in Lane
        return values

    def pinned(self, host: torch.Tensor) -> bool:  # noqa: D102 - as in Lane
        del host
        return self._direct

    def host_buffer(self, nbytes: int) -> torch.Tensor:  # noqa: D102 - as in Lane
        return torch.empty(nbytes, dtype=torch.uint8)


class _Event(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaLane(Lane):
    """Two side streams of a CUDA device: one for kernels, one for transfers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._work = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bus = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def caller(self) -> torch.cuda.Stream:  # noqa: D102 - as in Lane
        return torch.cuda.current_stream(self.device)

    def follow(self, caller: torch.cuda.Stream) -> None:  # noqa: D102 - as in Lane
        self._work.wait_stream(caller)

    def lead(self, caller: torch.cuda.Stream) -> None:  # noqa: D102 - as in Lane
        caller.wait_stream(self._work)

    def work(self) -> AbstractContextManager[Any]:  # noqa: D102 - as in Lane
        return torch.cuda.stream(self._work)

    def mark(self) -> Mark:  # noqa: D102 - as in Lane
        return _Event(self._work.record_event())

    def down(self, pairs: Pairs) -> Mark:  # noqa: D102 - as in Lane
        self._bus.wait_stream(self._work)
        return self._transfer(pairs)

    def up(self, pairs: Pairs, after: Mark | None) -> Mark:  # noqa: D102 - as in Lane
        if isinstance(after, _Event):
            self._bus.wait_event(after.event)
        end = self._transfer(pairs)
        self._work.wait_event(end.event)
        return end

    def _transfer(self, pairs: Pairs) -> _Event:
        with torch.cuda.stream(self._bus):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return _Event(self._bus.record_event())

    def upload(self, values: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as in Lane
        with torch.cuda.stream(self._work):
            return values.pin_memory().to(self.device, non_blocking=True)

    def pinned(self, host: torch.Tensor) -> bool:  # noqa: D102 - as in Lane
        return host.is_pinned()

    def host_buffer(self, nbytes: int) -> torch.Tensor:  # noqa: D102 - as in Lane
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # no page-locked memory to be had: slower, not wrong
            return torch.empty(nbytes, dtype=torch.uint8)


@functools.cache
def lane_of(device: torch.device) -> Lane | None:
    """The lane of a device, one per process; None for host memory.

    Devices other than CUDA's are copied to and from in the calling thread.
    """
    if device.type == "cpu":
        return None
    return CudaLane(device) if device.type == "cuda" else InlineLane(device)

"""Page-aligned memory, and gather lists that direct I/O accepts."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from kvstore_nvme.slot import PAGE_BYTES

_GROW_BYTES: Final = 1 << 20
_KEEP_BYTES: Final = 40 << 20  # a larger staging area is given back after the call that needed it
_COPYTO_BYTES: Final = 32 << 10  # from here releasing the GIL is worth numpy's microsecond
_MAX_PARTS: Final = 256  # of one record; the system takes 1,024 in a call


def address_of(view: memoryview) -> int:
    """Return where the bytes of a view lie in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between byte views of one length; large ones without the GIL."""
    if target.nbytes < _COPYTO_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Staging:
    """Page-aligned scratch memory of one thread, handed out from front to back.

    A context manager: at its end it goes back to ``home`` for the next user, and what was taken is
    no longer valid.
    """

    def __init__(self, home: list[Staging]) -> None:
        self._home: Final = home
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._used = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._used = 0
        if self._view.nbytes > _KEEP_BYTES:
            self._memory, self._view = None, memoryview(b"")
        self._home.append(self)

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` writable bytes that start on a page boundary; they hold anything."""
        start = -(-self._used // PAGE_BYTES) * PAGE_BYTES
        if start + nbytes > self._view.nbytes:
            size = max(_GROW_BYTES, 2 * self._view.nbytes if self._view.nbytes < _KEEP_BYTES // 2 else 0, nbytes)
            # Views of the old mapping keep it alive as long as they are used.
            self._memory = mmap.mmap(-1, -(-size // PAGE_BYTES) * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._view = memoryview(self._memory)
            start = 0
        self._used = start + nbytes
        return self._view[start : start + nbytes]


@dataclass(slots=True)
class Parts:
    """How one stretch of a file maps to memory.

    Attributes:
        vectors: Buffers for ``preadv`` or ``pwritev``, in file order.
        staged: Pairs of a caller's bytes and the scratch bytes that stand for them in ``vectors``.
        nbytes: Length of the stretch.
    """

    vectors: list[memoryview] = field(default_factory=list)
    staged: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    nbytes: int = 0

    def fill(self) -> None:
        """Before writing: copy callers' bytes into the scratch memory."""
        for theirs, ours in self.staged:
            copy_bytes(ours, theirs)

    def spill(self) -> None:
        """After reading: copy the scratch memory to the callers."""
        for theirs, ours in self.staged:
            copy_bytes(theirs, ours)


def plan(views: Sequence[memoryview], align: int, staging: Staging) -> Parts:
    """Map byte views to a stretch whose every part starts and ends at a multiple of ``align``.

    Aligned pieces of at least a page are used where they lie, everything else goes through
    ``staging``; the end is padded with zeros.
    """
    parts = Parts()
    if align == 1 and len(views) <= _MAX_PARTS:
        parts.vectors = [v for v in views if v.nbytes]
        parts.nbytes = sum(v.nbytes for v in views)
        return parts
    run: list[memoryview] = []
    run_bytes = 0
    for view in views:
        rest = view
        usable = view.nbytes // PAGE_BYTES * PAGE_BYTES
        if usable and run_bytes % align == 0 and len(views) <= _MAX_PARTS and address_of(view) % align == 0:
            _stage(parts, run, run_bytes, align, staging)
            run, run_bytes = [], 0
            parts.vectors.append(view[:usable])
            parts.nbytes += usable
            rest = view[usable:]
        if rest.nbytes:
            run.append(rest)
            run_bytes += rest.nbytes
    _stage(parts, run, run_bytes, align, staging)
    return parts


def _stage(parts: Parts, run: Sequence[memoryview], run_bytes: int, align: int, staging: Staging) -> None:
    if not run_bytes:
        return
    padded = -(-run_bytes // align) * align
    scratch = staging.take(padded)
    at = 0
    for view in run:
        parts.staged.append((view, scratch[at : at + view.nbytes]))
        at += view.nbytes
    scratch[at:] = bytes(padded - at)
    parts.vectors.append(scratch)
    parts.nbytes += padded


def cut_front(buffers: Sequence[memoryview | bytes], front_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split a gather list after ``front_bytes``."""
    front: list[memoryview] = []
    rest: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
        taken = min(front_bytes, view.nbytes)
        front_bytes -= taken
        if taken:
            front.append(view[:taken])
        if taken < view.nbytes:
            rest.append(view[taken:])
    return front, rest

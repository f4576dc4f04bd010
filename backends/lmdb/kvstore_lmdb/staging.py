"""One contiguous copy of a gather list: liblmdb takes a value as one buffer."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np

_JOIN_BYTES: Final = 256 << 10  # up to here one `bytes` from the allocator's warm heap is as fast
_COPYTO_BYTES: Final = 64 << 10  # from here releasing the GIL is worth numpy's microsecond


class Staging:
    """A reusable buffer for one writer; not thread-safe.

    A fresh ``bytes`` of megabytes costs a page fault per 4 KiB and holds the GIL while it is filled;
    this buffer stays mapped and large parts are copied with the GIL released.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._bytes = np.empty(0, np.uint8)

    def gather(self, buffers: Sequence[memoryview | bytes]) -> memoryview | bytes:
        """Return the buffers as one; valid until the next call."""
        if len(buffers) == 1:
            return buffers[0]
        views = [memoryview(b) for b in buffers]
        total = sum(v.nbytes for v in views)
        if total <= _JOIN_BYTES:
            return b"".join(views)
        self._reserve(total)
        at = 0
        for view in views:
            target = self._bytes[at : at + view.nbytes]
            if view.nbytes < _COPYTO_BYTES:
                target.data[:] = view.cast("B")
            else:
                np.copyto(target, np.frombuffer(view, np.uint8))
            at += view.nbytes
        return self._bytes[:total].data

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._bytes.size:
            return
        size = -(-nbytes // (1 << 20)) << 20
        # The old mapping goes when its last view does.
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(self._map, np.uint8)

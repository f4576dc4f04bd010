"""Scratch memory that is reused from block to block."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SMALLEST: Final = 1 << 16  # 64 KiB, one small block


class Arena:
    """Hands out consecutive pieces of one buffer that grows to what a round needs.

    Fresh pages cost a worker thread about a fifth of its time, reused ones nothing.  Pieces stay
    valid until :meth:`recycle`.  For one thread at a time.
    """

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._used = 0
        self._round_bytes = 0

    def reserve(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` of uninitialised scratch, kept only as far as :meth:`commit` says."""
        if self._used + nbytes > len(self._buffer):
            # Pieces handed out keep the outgrown buffer alive through their references.
            self._buffer = np.empty(max(nbytes, 2 * len(self._buffer), _SMALLEST), np.uint8)
            self._used = 0
        return self._buffer[self._used : self._used + nbytes]

    def commit(self, nbytes: int) -> None:
        """Keep the first ``nbytes`` of what :meth:`reserve` returned last."""
        self._used += nbytes
        self._round_bytes += nbytes

    def recycle(self) -> None:
        """Forget all pieces; the next round gets the same memory again."""
        if self._round_bytes > len(self._buffer):
            self._buffer = np.empty(self._round_bytes, np.uint8)
        self._used = 0
        self._round_bytes = 0

"""Slots of vLLM's CPU cache as tensors over the same memory, so that a block is copied once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from kvstore.errors import ClosedError, ConfigError


class PrimaryRows:
    """The rows of ``primary_kv_view``; each holds one chunk of all local ranks.

    Args:
        view: Two-dimensional and contiguous: chunks, bytes of a chunk.

    Raises:
        ConfigError: The view cannot hold a chunk, or is of another form.
    """

    def __init__(self, view: memoryview) -> None:
        if view.ndim != 2 or not view.c_contiguous or view.readonly:
            raise ConfigError(
                f"vLLM's CPU cache has {view.ndim} dimensions, contiguous={view.c_contiguous}, "
                f"readonly={view.readonly}; expected a writable, contiguous array of chunks: this vLLM is not supported"
            )
        if not view.nbytes:
            raise ConfigError("vLLM's CPU cache has no room for a single chunk; raise cpu_bytes_to_use")
        n_rows, row_items = view.shape if view.shape is not None else (0, 0)
        self.row_bytes = row_items * view.itemsize
        # Sub-views of two-dimensional memoryviews do not exist: rows are cut from the flat bytes.
        self._flat = view.cast("B")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of buffers that it takes for read-only
            flat = torch.frombuffer(self._flat, dtype=torch.uint8)
        self._rows: torch.Tensor | None = flat.view(n_rows, self.row_bytes)

    def at(self, chunk_ids: Iterable[int]) -> list[torch.Tensor]:
        """The rows of some chunks: ``(row_bytes,)`` uint8 each, over vLLM's own memory.

        Raises:
            ClosedError: :meth:`close` was called.
        """
        rows = self._rows
        if rows is None:
            raise ClosedError("vLLM's CPU cache was given back: the tier is shut down")
        return [rows[int(chunk_id)] for chunk_id in chunk_ids]

    def close(self) -> None:
        """Let go of the memory, so that vLLM can unmap it; idempotent."""
        self._rows = None
        self._flat.release()

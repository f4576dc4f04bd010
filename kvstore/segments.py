"""How a block is cut into segments that can be verified and decoded alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from kvstore.spec import BlockSpec

SEGMENT_RAW_TARGET: Final = 256 * 1024
"""Raw bytes a segment aims at: large enough for zstd and checksums, small enough for the L2 cache."""

MAX_SEAL_BYTES: Final = 64
"""A sealed segment is at most this much longer than the raw one: key id, nonce and tag."""


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """One run of whole items of the block's outermost axis.

    Attributes:
        spec: Spec of the whole block.
        first_item: Index of its first item on the outermost axis (bytes for opaque blocks).
        items: Number of items.
        raw_offset: Byte offset of the segment in the raw block.
        raw_bytes: Length of the raw segment in bytes.
    """

    spec: BlockSpec
    first_item: int
    items: int
    raw_offset: int
    raw_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the segment as an array of ``spec.dtype`` elements."""
        return (self.items, *self.spec.shape[1:])


@functools.lru_cache(maxsize=64)
def plan_segments(spec: BlockSpec) -> tuple[SegmentGeometry, ...]:
    """Cut a block of ``spec`` into segments of about :data:`SEGMENT_RAW_TARGET` raw bytes.

    Every segment holds whole items of the outermost axis (layers in LCND, tokens in NCLD), at
    least one; the same spec is always cut alike, which the record format relies on.
    """
    n_items = spec.shape[0]
    item_bytes = spec.nbytes // n_items
    per_segment = max(1, round(SEGMENT_RAW_TARGET / item_bytes))
    segments = []
    for first in range(0, n_items, per_segment):
        items = min(per_segment, n_items - first)
        segments.append(SegmentGeometry(spec, first, items, first * item_bytes, items * item_bytes))
    return tuple(segments)

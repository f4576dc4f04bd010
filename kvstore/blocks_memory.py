"""Views of a block's memory, and the copy that does not hold the GIL."""

from __future__ import annotations

import numpy as np

from kvstore.segments import SegmentGeometry


def as_bytes(view: memoryview) -> memoryview:
    """Return ``view`` as a flat view of bytes; it must be C-contiguous."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def segment_view(block: memoryview, geometry: SegmentGeometry) -> memoryview:
    """Return the part of a raw block that is one segment."""
    return block[geometry.raw_offset : geometry.raw_offset + geometry.raw_bytes]


def copy_bytes(out: memoryview, source: memoryview | bytes) -> None:
    """Copy ``source`` into ``out`` of the same length without holding the GIL.

    Slice assignment of memoryviews would hold it for the whole copy.
    """
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def check_namespace(namespace: bytes) -> None:
    """Raise ValueError unless ``namespace`` is a digest of 16 bytes."""
    if len(namespace) != 16:
        msg = f"namespace has {len(namespace)} bytes; expected a digest of 16"
        raise ValueError(msg)

"""The stored form that both plane codecs share.

::

    n_frames u32 · length of each frame u32 · lo plane, one byte per element · the zstd frames

The lo plane is stored raw, so that it is read straight from the map or receive buffer; the hi
bytes go through zstd.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvstore.errors import CorruptRecordError
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec
from kvstore_zstd.arena import Arena, Bytes

Words = npt.NDArray[np.uint16]

WORD: Final = np.dtype("<u2")
_U32: Final = struct.Struct("<I")

CHUNK_ELEMENTS: Final = 128 * 1024
"""Elements per pass: words, planes and scratch of a chunk stay in a core's L2 cache."""


def supports_planes(spec: BlockSpec) -> bool:
    """Whether ``spec`` holds 16-bit floats."""
    return spec.dtype in {"bfloat16", "float16"}


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """A segment's elements seen as ``(outer, kv, inner)``: keys and values become planes of their own.

    Attributes:
        outer: Elements of all axes before the kv axis; 1 when there is nothing to take apart.
        kv: Planes, 1 or 2: keys and values where the segment holds both.
        inner: Elements of all axes behind the kv axis.
        before_tokens: Elements of the axes before the token axis, within one plane.
        tokens: Tokens in the segment.
        after_tokens: Elements of the axes behind the token axis, within one plane.
    """

    outer: int
    kv: int
    inner: int
    before_tokens: int
    tokens: int
    after_tokens: int

    @property
    def elements(self) -> int:
        """Elements in the segment, and bytes of its lo plane."""
        return self.outer * self.kv * self.inner

    @property
    def plane_elements(self) -> int:
        """Elements in one plane, and bytes of its hi bytes."""
        return self.outer * self.inner

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Cut a plane, ``(outer, inner)``, into index pairs of at most :data:`CHUNK_ELEMENTS`."""
        columns = min(self.inner, CHUNK_ELEMENTS)
        rows = max(1, CHUNK_ELEMENTS // columns)
        for row in range(0, self.outer, rows):
            for column in range(0, self.inner, columns):
                yield slice(row, row + rows), slice(column, column + columns)


@functools.lru_cache(maxsize=1024)
def plane_layout(geometry: SegmentGeometry) -> PlaneLayout:
    """Find the planes of a segment.

    Raises:
        CorruptRecordError: ``codec``: the spec holds no 16-bit floats, so that no record of it can
            have planes.
    """
    spec = geometry.spec
    if not supports_planes(spec):
        raise CorruptRecordError("codec", f"planes of {spec.dtype} do not exist")
    axes, shape = spec.axes, geometry.shape
    c = axes.index("C")
    kv = shape[c]
    outer, inner = (math.prod(shape[:c]), math.prod(shape[c + 1 :])) if kv > 1 else (1, math.prod(shape))
    n = axes.index("N")
    before = math.prod(size for axis, size in zip(axes[:n], shape[:n], strict=True) if axis != "C")
    after = math.prod(size for axis, size in zip(axes[n + 1 :], shape[n + 1 :], strict=True) if axis != "C")
    return PlaneLayout(outer, kv, inner, before, shape[n], after)


class PayloadWriter:
    """Builds one stored segment in an arena: room for the lo plane first, the frames afterwards."""

    def __init__(self, arena: Arena, layout: PlaneLayout, n_frames: int) -> None:
        self._arena = arena
        self._lo_start = 4 + 4 * n_frames
        self._lo_end = self._lo_start + layout.elements
        self._raw_bytes = 2 * layout.elements
        self._stored = arena.reserve(max(self._raw_bytes, self._lo_end))
        self.lo: Bytes = self._stored[self._lo_start : self._lo_end].reshape(layout.outer, layout.kv, layout.inner)

    def finish(self, frames: Sequence[bytes]) -> memoryview | None:
        """Append the frames and return the stored bytes; None when they are not shorter than raw."""
        total = self._lo_end + sum(map(len, frames))
        if total >= self._raw_bytes:
            return None
        header = struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames))
        start = self._lo_end
        self._stored[: self._lo_start] = np.frombuffer(header, np.uint8)
        for frame in frames:
            self._stored[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
            start += len(frame)
        self._arena.commit(total)
        return self._stored[:total].data


def parse_payload(stored: memoryview, layout: PlaneLayout, most_frames: int) -> tuple[Bytes, list[memoryview]]:
    """Take a stored segment apart; allocates nothing.

    Args:
        stored: The stored bytes.
        layout: What the segment must hold.
        most_frames: Largest number of frames that makes sense; the least is one per plane.

    Returns:
        The lo plane as ``(outer, kv, inner)`` and the frames, all views of ``stored``.

    Raises:
        CorruptRecordError: ``codec``: frames and lo plane do not fill the segment exactly.
    """
    n_frames = _U32.unpack_from(stored)[0] if len(stored) >= 4 else 0
    if not layout.kv <= n_frames <= most_frames or len(stored) < 4 + 4 * n_frames:
        raise CorruptRecordError("codec", f"{n_frames} frames in a segment of {len(stored)} bytes")
    lengths = struct.unpack_from(f"<{n_frames}I", stored, 4)
    lo_start = 4 + 4 * n_frames
    start = lo_start + layout.elements
    if start + sum(lengths) != len(stored):
        detail = f"frames of {lengths} bytes and a plane of {layout.elements} in a segment of {len(stored)}"
        raise CorruptRecordError("codec", detail)
    lo = np.frombuffer(stored[lo_start:start], np.uint8).reshape(layout.outer, layout.kv, layout.inner)
    frames: list[memoryview] = []
    for length in lengths:
        frames.append(stored[start : start + length])
        start += length
    return lo, frames


def plane_compressor() -> zstandard.ZstdCompressor:
    """A zstd compressor used as an order-0 Huffman coder.

    Exponents have no long repeats, so that searching for matches only costs time and, by spoiling
    the literals' statistics, space: on the hi plane of real KV these settings give 0.372 of the
    size at about 1 GB/s, level 3 gives 0.442 at 0.18 GB/s.
    """
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=1,
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        search_log=1,
        window_log=17,
        target_length=0,
        write_content_size=1,
        write_checksum=0,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)

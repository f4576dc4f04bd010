"""The codec ``planes``: 16-bit floats as an entropy-coded high byte and a raw low byte."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import zstandard

from kvstore.codec import Codec, OpenSegment
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec
from kvstore_zstd.arena import Arena, Bytes
from kvstore_zstd.frames import open_frame
from kvstore_zstd.payload import (
    WORD,
    PayloadWriter,
    PlaneLayout,
    parse_payload,
    plane_compressor,
    plane_layout,
    supports_planes,
)

_HIGH_BYTE: Final = np.uint16(256)


class PlanesSegment(OpenSegment):
    """High bytes decompressed, low bytes where they were stored."""

    __slots__ = ("_hi", "_layout", "_lo")

    def __init__(self, layout: PlaneLayout, lo: Bytes, hi: list[Bytes]) -> None:
        self._layout = layout
        self._lo = lo
        self._hi = hi

    def write_into(self, out: memoryview) -> None:
        """Merge the planes into ``out``; runs without the GIL."""
        layout = self._layout
        words = np.frombuffer(out, WORD).reshape(layout.outer, layout.kv, layout.inner)
        for plane, hi in enumerate(self._hi):
            for rows, columns in layout.pieces():
                piece = words[rows, plane, columns]
                np.multiply(hi[rows, columns], _HIGH_BYTE, out=piece, dtype=np.uint16)
                np.add(piece, self._lo[rows, plane, columns], out=piece)


class PlanesCodec(Codec):
    """Splits 16-bit floats into bytes: sign and exponent compress well, the mantissa does not.

    Bit-exact for every bit pattern.  Keys and values get a zstd frame each, because their
    exponents are distributed differently.
    """

    codec_id: ClassVar[int] = 2
    name: ClassVar[str] = "planes"

    def __init__(self) -> None:
        self._compressor = plane_compressor()
        self._decompressor = zstandard.ZstdDecompressor()
        self._arena = Arena()
        self._scratch = Arena()

    def supports(self, spec: BlockSpec) -> bool:
        """Whether ``spec`` holds 16-bit floats."""
        return supports_planes(spec)

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> memoryview | None:
        """Store the low bytes raw and the high bytes as one frame each for keys and values."""
        layout = plane_layout(geometry)
        words = np.frombuffer(raw, WORD).reshape(layout.outer, layout.kv, layout.inner)
        writer = PayloadWriter(self._arena, layout, layout.kv)
        hi = self._scratch.reserve(layout.plane_elements).reshape(layout.outer, layout.inner)
        frames: list[bytes] = []
        for plane in range(layout.kv):
            for rows, columns in layout.pieces():
                piece = words[rows, plane, columns]
                # casts inside the ufunc run at five times the speed of strided byte views
                np.right_shift(piece, 8, out=hi[rows, columns], casting="unsafe")
                np.copyto(writer.lo[rows, plane, columns], piece, casting="unsafe")
            frames.append(self._compressor.compress(hi.data))
        return writer.finish(frames)

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> PlanesSegment:
        """Decompress the high bytes; the low bytes stay where they are.

        Raises:
            CorruptRecordError: ``codec``.
        """
        layout = plane_layout(geometry)
        lo, frames = parse_payload(stored, layout, layout.kv)
        hi = [open_frame(self._decompressor, frame, layout.plane_elements) for frame in frames]
        shape = (layout.outer, layout.inner)
        return PlanesSegment(layout, lo, [np.frombuffer(plane, np.uint8).reshape(shape) for plane in hi])

    def recycle(self) -> None:
        """Reuse the memory of all segments encoded so far."""
        self._arena.recycle()

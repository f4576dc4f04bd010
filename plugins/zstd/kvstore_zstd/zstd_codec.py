"""The codec ``zstd``: one zstd frame per segment, for data that has no 16-bit floats."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import zstandard

from kvstore.codec import Codec, OpenSegment
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec
from kvstore_zstd.frames import open_frame

DEFAULT_LEVEL: Final = 1
"""8-bit KV: higher levels are several times slower and gain less than one percent."""


class InflatedSegment(OpenSegment):
    """A decompressed segment."""

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def write_into(self, out: memoryview) -> None:
        """Copy the bytes into ``out``; the copy runs without the GIL."""
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(self._content, np.uint8))


class ZstdCodec(Codec):
    """General compression of blocks of any spec.

    Args:
        level: zstd level; only 1 was found worth its time on KV cache.
    """

    codec_id: ClassVar[int] = 1
    name: ClassVar[str] = "zstd"

    def __init__(self, level: int = DEFAULT_LEVEL) -> None:
        # Contexts must never be shared between threads, and a fresh one costs as much as a small block.
        self._compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    def supports(self, spec: BlockSpec) -> bool:  # noqa: ARG002 - every spec
        """Every block can be tried; the encoder stores raw what does not shrink."""
        return True

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes | None:
        """Compress into one frame, or return None when it would not be shorter."""
        frame = self._compressor.compress(raw)
        return frame if len(frame) < geometry.raw_bytes else None

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> InflatedSegment:
        """Decompress one frame of exactly the segment's size.

        Raises:
            CorruptRecordError: ``codec``.
        """
        return InflatedSegment(open_frame(self._decompressor, stored, geometry.raw_bytes))

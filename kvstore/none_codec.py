"""The codec ``none``: the bytes themselves."""

from __future__ import annotations

from typing import ClassVar

from kvstore.blocks_memory import copy_bytes
from kvstore.codec import Codec, OpenSegment
from kvstore.errors import CorruptRecordError
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec


class RawSegment(OpenSegment):
    """A segment stored raw; borrows the stored bytes until they are written."""

    __slots__ = ("_stored",)

    def __init__(self, stored: memoryview) -> None:
        self._stored = stored

    def write_into(self, out: memoryview) -> None:
        """Copy the bytes into ``out``; the copy runs without the GIL."""
        copy_bytes(out, self._stored)


class NoneCodec(Codec):
    """Stores blocks of any spec as they are; thread-safe, keeps no state."""

    codec_id: ClassVar[int] = 0
    name: ClassVar[str] = "none"

    def supports(self, spec: BlockSpec) -> bool:  # noqa: ARG002 - every spec
        """Every block can be stored as it is."""
        return True

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> None:  # noqa: ARG002 - nothing to do
        """Return None: nothing is ever shorter than raw."""
        return

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> RawSegment:
        """Take the stored bytes for the raw ones.

        Raises:
            CorruptRecordError: The length is not the segment's.
        """
        if len(stored) != geometry.raw_bytes:
            detail = f"a raw segment of {len(stored)} bytes, expected {geometry.raw_bytes}"
            raise CorruptRecordError("codec", detail)
        return RawSegment(stored)

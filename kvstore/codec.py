"""The contract of a codec: one segment of a block to stored bytes and back, losslessly.

Decoding has two steps so that a caller's memory is only touched by data that is known good:
:meth:`Codec.open_segment` checks and decompresses as far as it can fail, and the returned
:class:`OpenSegment` then writes its bytes without failing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kvstore.segments import MAX_SEAL_BYTES, SegmentGeometry
from kvstore.spec import BlockSpec

__all__ = ["MAX_SEAL_BYTES", "Codec", "CodecContext", "OpenSegment"]


class OpenSegment(ABC):
    """A verified segment, ready to be written where it belongs."""

    @abstractmethod
    def write_into(self, out: memoryview) -> None:
        """Write the raw bytes into ``out`` (writable, ``raw_bytes`` long); never fails."""


class Codec(ABC):
    """One lossless coding of segments.

    An instance belongs to one thread at a time: the core makes one per worker thread through the
    plugin's factory, so it may keep scratch buffers and compression contexts.
    """

    codec_id: ClassVar[int]
    """Number in stored records, for life; 0-63 are kvstore's own, others are for third parties."""

    name: ClassVar[str]

    seals: ClassVar[bool] = False
    """Whether the codec hides what a block holds (encryption).

    Nothing of a block that a sealing codec encodes is ever stored as it is: every segment goes
    through it, may come out up to :data:`MAX_SEAL_BYTES` longer than it went in, and
    :meth:`encode_segment` never answers None.  What was sealed for one block does not open as
    another's."""

    def begin(self, namespace: bytes, digest: bytes) -> None:
        """Say which block the segments of the calls that follow belong to.

        Called for codecs that declare :attr:`seals`, before the first segment of each block that is
        encoded and before every run of segments of one block that are opened.

        Args:
            namespace: 16-byte digest of the namespace.
            digest: 32-byte digest of the block.
        """

    @abstractmethod
    def supports(self, spec: BlockSpec) -> bool:
        """Whether this codec can encode blocks of ``spec``; decoding follows the record."""

    @abstractmethod
    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> memoryview | bytes | None:
        """Encode one segment.

        Args:
            raw: Read-only bytes of the segment, C-contiguous, ``geometry.raw_bytes`` long.
            geometry: Where the segment lies in the block.

        Returns:
            The stored bytes, valid until the next call on this instance after
            :meth:`recycle`; or None when they would not be shorter than ``raw``.
        """

    @abstractmethod
    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> OpenSegment:
        """Check and decompress one stored segment whose checksum was already verified.

        Allocates at most ``geometry.raw_bytes`` plus a constant, whatever ``stored`` claims; a codec
        that decrypts what another one then decodes, twice that.

        Raises:
            CorruptRecordError: The bytes are not what this codec writes for that geometry.
        """

    def recycle(self) -> None:
        """Reuse scratch memory: results of earlier calls on this instance are no longer needed."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What a codec plugin with options is made from.

    Attributes:
        options: Instance of the plugin's options dataclass, as the config's ``[codecs.NAME]`` says.
        codec: Finds another codec, by name for encoding or by id for decoding, for a codec that
            wraps one; None when no usable plugin has it.  It belongs to the same thread.
    """

    options: Any
    codec: Callable[[str | int], Codec | None]

"""What a decoder hands out: verified records, and verified heads of records that are read piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.blocks_memory import as_bytes, copy_bytes, segment_view
from kvstore.codec import OpenSegment
from kvstore.record import Head, RecordMeta, unpack_head
from kvstore.segments import SegmentGeometry

_ZEROS_32: Final = bytes(32)


class OpenBlock:
    """A verified record, ready to be written where its block belongs.

    Borrows the record's memory until :meth:`write_into` has run; may be handed to another thread.

    Attributes:
        token_ids: The block's tokens as little-endian u32, or None when the record has none.
    """

    __slots__ = ("_head", "_nbytes", "_raw", "_segments", "token_ids")

    def __init__(
        self,
        head: Head | memoryview,
        token_ids: bytes | None,
        raw: memoryview | None,
        segments: Sequence[tuple[SegmentGeometry, OpenSegment]],
    ) -> None:
        self._head = head  # a record whose head nobody may ever ask for is not unpacked
        self.token_ids = token_ids
        self._raw = raw
        self._segments = segments
        self._nbytes = len(raw) if raw is not None else sum(geometry.raw_bytes for geometry, _ in segments)

    @property
    def head(self) -> Head:
        """The record's header."""
        if isinstance(self._head, memoryview):
            self._head = unpack_head(self._head)
        return self._head

    @property
    def is_raw(self) -> bool:
        """Whether the block is stored as it is, so that writing it is one copy."""
        return self._raw is not None

    @property
    def raw(self) -> memoryview | None:
        """The block's bytes where they lie, borrowed like the record, when it is stored as it is."""
        return self._raw

    @property
    def codec_id(self) -> int:
        """Codec the record was stored with; 0 for raw."""
        return self.head.codec_id

    @property
    def created(self) -> int:
        """When the record was made, in Unix seconds."""
        return self.head.created

    @property
    def header_checksum(self) -> int:
        """Names this very record, see :meth:`kvstore.backend.Backend.discard`."""
        return self.head.checksum

    @property
    def meta(self) -> RecordMeta:
        """Where the block stands, as it was given to :meth:`BlockEncoder.encode`."""
        head = self.head
        parent = head.parent if head.parent_known and head.parent != _ZEROS_32 else None
        return RecordMeta(head.digest, parent, head.block_index, head.group, self.token_ids, head.parent_known)

    def write_into(self, out: memoryview) -> None:
        """Write the block's bytes; nothing that is wrong with the record can show up here.

        Args:
            out: Writable, C-contiguous, ``spec.nbytes`` long.

        Raises:
            ValueError: ``out`` has the wrong length; nothing was written.
        """
        out = as_bytes(out)
        if len(out) != self._nbytes:
            msg = f"the block has {self._nbytes} bytes, the destination {len(out)}"
            raise ValueError(msg)
        if self._raw is not None:
            copy_bytes(out, self._raw)
            return
        for geometry, segment in self._segments:
            segment.write_into(segment_view(out, geometry))


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """A verified head: where each data segment of the record lies and how to check it.

    Attributes:
        head: The header.
        spans: ``(start, stop)`` of each data segment in the record, in bytes.
        checksums: xxh3_64 of the stored bytes of each segment.
        tags: Authentication tag of each segment, where there is a key.
        key: The one that made the record; None when none was asked for.
    """

    head: Head
    spans: tuple[tuple[int, int], ...]
    checksums: tuple[int, ...]
    tags: tuple[bytes, ...] = ()
    key: bytes | None = field(default=None, repr=False)

    @property
    def header_checksum(self) -> int:
        """Names this very record, see :meth:`kvstore.backend.Backend.discard`."""
        return self.head.checksum

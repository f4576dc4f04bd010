"""Records to blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.blocks_memory import as_bytes, check_namespace, copy_bytes, segment_view
from kvstore.blocks_plain import PlainRecords
from kvstore.codec import Codec, OpenSegment
from kvstore.errors import CorruptRecordError
from kvstore.none_codec import NoneCodec, RawSegment
from kvstore.record import (
    FLAG_KEYED,
    FLAG_TOKEN_IDS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    Head,
    RecordMeta,
    check_structure,
    unpack_head,
    verify_head,
    verify_segment,
)
from kvstore.segments import SegmentGeometry, plan_segments
from kvstore.spec import BlockSpec

_ZEROS_16: Final = bytes(16)
_ZEROS_32: Final = bytes(32)

# picks the header fields that are the same in all records of one spec and namespace
_constant_fields: Final = itemgetter(
    *map(
        Head._fields.index,
        (
            *("magic", "format_version", "header_bytes", "dtype_id", "layout_id", "namespace"),
            *("fingerprint", "block_tokens", "raw_bytes", "tag", "reserved"),
        ),
    ),
)


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
        header_checksum: Names this very record, see :meth:`kvstore.backend.Backend.discard`.
        codec_id: Codec of the segments that are not stored raw.
        spans: ``(start, stop)`` of each data segment in the record, in bytes.
        checksums: xxh3_64 of the stored bytes of each segment.
    """

    header_checksum: int
    codec_id: int
    spans: tuple[tuple[int, int], ...]
    checksums: tuple[int, ...]


class BlockDecoder:
    """Verifies and decodes records of one spec and namespace.

    An instance belongs to one thread, as its codecs do.

    Args:
        spec: Spec that records must have been made for.
        namespace: 16-byte digest of the namespace that records must belong to.
        codecs: Returns the codec of an id, or None when there is none; asked once per id.

    Raises:
        ValueError: ``namespace`` is not 16 bytes long.
    """

    def __init__(self, spec: BlockSpec, namespace: bytes, codecs: Callable[[int], Codec | None]) -> None:
        check_namespace(namespace)
        self._spec_nbytes = spec.nbytes
        self._namespace = namespace
        self._plan = plan_segments(spec)
        self._raw_lengths = tuple(geometry.raw_bytes for geometry in self._plan)
        self._expected = (
            *(MAGIC, FORMAT_VERSION, HEADER_BYTES),
            *(spec.dtype_id, spec.layout_id, namespace, spec.fingerprint(), spec.block_tokens, spec.nbytes),
            *(_ZEROS_16, _ZEROS_16),
        )
        self._plain = PlainRecords(spec, namespace)
        self._find_codec = codecs
        self._codecs: dict[int, Codec] = {}

    def open(self, record: memoryview, digest: bytes) -> OpenBlock:
        """Verify a record and prepare its block, as far as anything can go wrong.

        Never allocates more than about the size of one block, whatever the record claims.

        Args:
            record: The whole record; must stay unchanged until the block was written.
            digest: 32-byte digest of the block that was asked for.

        Raises:
            CorruptRecordError: The record is not a sound record of that block.  Its reason is
                ``key`` or ``spec`` for a sound record of something else, and ``version`` for a
                record that this process is not equipped to read.
        """
        record = as_bytes(record)
        payload = self._plain.payload(record, digest)
        if payload is not None:
            return OpenBlock(record, None, payload, ())
        head = unpack_head(record)
        # One comparison settles the usual record; anything else is examined step by step.
        usual = _constant_fields(head) == self._expected and self._has_expected_size(head, len(record))
        table = verify_head(record, head) if usual else self._examine(record, head, digest)
        if head.digest != digest:
            raise CorruptRecordError("key", f"record of block {head.digest.hex()}, asked for {digest.hex()}")
        stored = self._verify_segments(record, head, table)
        token_ids = bytes(stored.pop()) if head.flags & FLAG_TOKEN_IDS else None
        return self._open(record, head, token_ids, stored)

    def open_head(self, start: memoryview, digest: bytes) -> SegmentTable:
        """Verify the head of a record of which only the beginning was read.

        Args:
            start: The record's first bytes, the whole head among them.
            digest: As for :meth:`open`.

        Raises:
            CorruptRecordError: As :meth:`open`.
        """
        start = as_bytes(start)
        head = unpack_head(start)
        table = self._examine(start, head, digest, record_bytes=head.record_bytes)
        spans: list[tuple[int, int]] = []
        offset = head.head_bytes
        for (stored_bytes, raw_bytes, _), geometry in zip(table, self._plan, strict=False):  # token ids come last
            if raw_bytes != geometry.raw_bytes:
                raise CorruptRecordError("length", f"a segment of {raw_bytes} raw bytes, expected {geometry.raw_bytes}")
            spans.append((offset, offset + stored_bytes))
            offset += stored_bytes
        return SegmentTable(head.checksum, head.codec_id, tuple(spans), tuple(checksum for _, _, checksum in table))

    def open_segment(self, table: SegmentTable, index: int, stored: memoryview) -> OpenSegment:
        """Verify one segment on its own and prepare it, as far as anything can go wrong.

        Args:
            table: What :meth:`open_head` returned for its record.
            index: Which data segment.
            stored: Its stored bytes; must stay unchanged until the segment was written.

        Raises:
            CorruptRecordError: ``length``, ``checksum`` or ``codec``.
        """
        start, stop = table.spans[index]
        if len(stored) != stop - start:
            raise CorruptRecordError("length", f"segment {index} has {len(stored)} bytes, expected {stop - start}")
        verify_segment(stored, table.checksums[index], index)
        geometry = self._plan[index]
        if len(stored) == geometry.raw_bytes:
            return RawSegment(stored)
        return self._codec(table.codec_id).open_segment(stored, geometry)

    def recycle(self) -> None:
        """Reuse scratch memory: the blocks opened so far are no longer needed."""
        for codec in self._codecs.values():
            codec.recycle()

    def _has_expected_size(self, head: Head, record_bytes: int) -> bool:
        flags, n_segments = head.flags, head.n_segments
        return (
            flags < FLAG_KEYED
            and n_segments == len(self._raw_lengths) + (flags >> 1)  # one more for token ids
            and HEADER_BYTES + 16 * n_segments + head.stored_bytes == record_bytes
        )

    def _examine(
        self, record: memoryview, head: Head, digest: bytes, record_bytes: int | None = None
    ) -> list[tuple[int, int, int]]:
        """Find what is wrong with a record, in the order that the format lays down."""
        check_structure(record, head, record_bytes)
        n_data = head.n_segments - head.has_token_ids
        fits = head.raw_bytes == self._spec_nbytes and n_data == len(self._raw_lengths)
        try:
            table = verify_head(record, head)
        except CorruptRecordError as error:
            if not fits and error.reason == "checksum":
                detail = f"{head.raw_bytes} raw bytes in {n_data} segments, this spec has {self._spec_nbytes}"
                raise CorruptRecordError("length", detail) from error
            raise
        if head.keyed:
            raise CorruptRecordError("version", "the record is keyed and no key is configured")
        if head.namespace != self._namespace:
            raise CorruptRecordError("key", f"namespace {head.namespace.hex()}, expected {self._namespace.hex()}")
        if head.digest != digest:
            raise CorruptRecordError("key", f"record of block {head.digest.hex()}, asked for {digest.hex()}")
        if not fits or _constant_fields(head) != self._expected:
            detail = f"made for another block spec: {head.raw_bytes} raw bytes, fingerprint {head.fingerprint.hex()}"
            raise CorruptRecordError("spec", detail)
        return table

    def _verify_segments(self, record: memoryview, head: Head, table: list[tuple[int, int, int]]) -> list[memoryview]:
        lengths = (*self._raw_lengths, 4 * head.block_tokens) if head.flags & FLAG_TOKEN_IDS else self._raw_lengths
        stored: list[memoryview] = []
        start = HEADER_BYTES + 16 * len(table)
        for (stored_bytes, raw_bytes, checksum), expected in zip(table, lengths, strict=True):
            if raw_bytes != expected:
                raise CorruptRecordError("length", f"a segment of {raw_bytes} raw bytes, expected {expected}")
            end = start + stored_bytes
            piece = record[start:end]
            if xxh3_64_intdigest(piece) != checksum:
                raise CorruptRecordError("checksum", f"segment {len(stored)} does not match its checksum")
            stored.append(piece)
            start = end
        return stored

    def _open(self, record: memoryview, head: Head, token_ids: bytes | None, stored: list[memoryview]) -> OpenBlock:
        """Prepare the segments of a record whose every byte was verified."""
        codec = self._codec(head.codec_id)
        if head.stored_bytes - len(token_ids or b"") == self._spec_nbytes:  # all raw: the payload is the block
            start = len(record) - head.stored_bytes
            return OpenBlock(head, token_ids, record[start : start + self._spec_nbytes], [])
        opened: list[tuple[SegmentGeometry, OpenSegment]] = []
        for geometry, piece in zip(self._plan, stored, strict=True):
            raw = len(piece) == geometry.raw_bytes
            opened.append((geometry, RawSegment(piece) if raw else codec.open_segment(piece, geometry)))
        return OpenBlock(head, token_ids, None, opened)

    def _codec(self, codec_id: int) -> Codec:
        codec = self._codecs.get(codec_id)
        if codec is None:
            codec = NoneCodec() if codec_id == NoneCodec.codec_id else self._find_codec(codec_id)
            if codec is None:
                raise CorruptRecordError("codec", f"no codec of id {codec_id} is installed")
            self._codecs[codec_id] = codec
        return codec

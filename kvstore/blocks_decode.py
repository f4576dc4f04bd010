"""Records to blocks."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.blocks_memory import as_bytes, check_namespace
from kvstore.blocks_open import OpenBlock, SegmentTable
from kvstore.blocks_plain import PlainRecords
from kvstore.codec import Codec, OpenSegment
from kvstore.errors import CorruptRecordError
from kvstore.none_codec import NoneCodec, RawSegment
from kvstore.record import (
    ENTRY_BYTES,
    FLAG_KEYED,
    FLAG_TOKEN_IDS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    Head,
    check_head,
    check_structure,
    unpack_head,
    verify_head,
    verify_segment,
)
from kvstore.record_tags import RecordTags, check_segment, segment_tags
from kvstore.segments import SegmentGeometry, plan_segments
from kvstore.spec import BlockSpec

_ZEROS_16: Final = bytes(16)

# picks the header fields that are the same in all records of one spec and namespace
_constant_fields: Final = itemgetter(
    *map(
        Head._fields.index,
        (
            *("magic", "format_version", "header_bytes", "dtype_id", "layout_id", "namespace"),
            *("fingerprint", "block_tokens", "raw_bytes", "reserved"),
        ),
    ),
)


class BlockDecoder:
    """Verifies and decodes records of one spec and namespace.

    An instance belongs to one thread, as its codecs do.

    Args:
        spec: Spec that records must have been made for.
        namespace: 16-byte digest of the namespace that records must belong to.
        codecs: Returns the codec of an id, or None when there is none; asked once for each that it
            returns.  Raises CorruptRecordError for one that cannot be used.
        tags: Keys, one of which must have made each record; None for a reader without keys, to which
            keyed records are misses.

    Raises:
        ValueError: ``namespace`` is not 16 bytes long.
    """

    def __init__(
        self,
        spec: BlockSpec,
        namespace: bytes,
        codecs: Callable[[int], Codec | None],
        *,
        tags: RecordTags | None = None,
    ) -> None:
        check_namespace(namespace)
        self._spec_nbytes = spec.nbytes
        self._namespace = namespace
        self._plan = plan_segments(spec)
        self._raw_lengths = tuple(geometry.raw_bytes for geometry in self._plan)
        self._expected = (
            *(MAGIC, FORMAT_VERSION, HEADER_BYTES),
            *(spec.dtype_id, spec.layout_id, namespace, spec.fingerprint(), spec.block_tokens, spec.nbytes),
            _ZEROS_16,
        )
        self._tags = tags
        # a reader with keys takes no plain record, however sound it looks
        self._plain_payload = PlainRecords(spec, namespace).payload if tags is None else _no_payload
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
        payload = self._plain_payload(record, digest)
        if payload is not None:
            return OpenBlock(record, None, payload, ())
        head = unpack_head(record)
        key = None
        # One comparison settles the usual record; anything else is examined step by step.
        if self._is_usual(head, len(record)):
            table = verify_head(record, head)
        else:
            table, key = self._examine(record, head, digest)
        if head.digest != digest:
            raise CorruptRecordError("key", f"record of block {head.digest.hex()}, asked for {digest.hex()}")
        stored = self._verify_segments(record, head, table)
        if key is not None:
            for index, (tag, piece) in enumerate(zip(segment_tags(record[: head.head_bytes]), stored, strict=True)):
                check_segment(key, tag, piece, index)
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
        table, key = self._examine(start, head, digest, record_bytes=head.record_bytes)
        spans: list[tuple[int, int]] = []
        offset = head.head_bytes
        for (stored_bytes, raw_bytes, _), geometry in zip(table, self._plan, strict=False):  # token ids come last
            if raw_bytes != geometry.raw_bytes:
                raise CorruptRecordError("length", f"a segment of {raw_bytes} raw bytes, expected {geometry.raw_bytes}")
            spans.append((offset, offset + stored_bytes))
            offset += stored_bytes
        tags = () if key is None else tuple(segment_tags(start[: head.head_bytes]))
        return SegmentTable(head, tuple(spans), tuple(checksum for _, _, checksum in table), tags, key)

    def open_segment(self, table: SegmentTable, index: int, stored: memoryview) -> OpenSegment:
        """Verify one segment on its own and prepare it, as far as anything can go wrong.

        Args:
            table: What :meth:`open_head` returned for its record.
            index: Which data segment.
            stored: Its stored bytes; must stay unchanged until the segment was written.

        Raises:
            CorruptRecordError: ``length``, ``checksum``, ``tag`` or ``codec``.
        """
        start, stop = table.spans[index]
        if len(stored) != stop - start:
            raise CorruptRecordError("length", f"segment {index} has {len(stored)} bytes, expected {stop - start}")
        verify_segment(stored, table.checksums[index], index)
        if table.key is not None:
            check_segment(table.key, table.tags[index], stored, index)
        geometry, codec = self._plan[index], self._codec_of(table.head)
        if len(stored) == geometry.raw_bytes and not codec.seals:
            return RawSegment(stored)
        return codec.open_segment(stored, geometry)

    def recycle(self) -> None:
        """Reuse scratch memory: the blocks opened so far are no longer needed."""
        for codec in self._codecs.values():
            codec.recycle()

    def _is_usual(self, head: Head, record_bytes: int) -> bool:
        flags, n_segments = head.flags, head.n_segments
        return (
            _constant_fields(head) == self._expected
            and flags < FLAG_KEYED
            and self._tags is None
            and n_segments == len(self._raw_lengths) + (flags >> 1)  # one more for token ids
            and HEADER_BYTES + ENTRY_BYTES * n_segments + head.stored_bytes == record_bytes
        )

    def _examine(
        self, record: memoryview, head: Head, digest: bytes, record_bytes: int | None = None
    ) -> tuple[list[tuple[int, int, int]], bytes | None]:
        """Find what is wrong with a record, in the order that the format lays down.

        Returns:
            The segment table, and the key that made the record if there are keys.
        """
        check_structure(record, head, record_bytes)
        n_data = head.n_segments - head.has_token_ids
        fits = head.raw_bytes == self._spec_nbytes and n_data == len(self._raw_lengths)
        table: list[tuple[int, int, int]] = []
        try:
            if fits:
                table = verify_head(record, head)
            else:  # refused below, so that however many rows there are, none takes memory
                check_head(record, head)
        except CorruptRecordError as error:
            if not fits and error.reason == "checksum":
                detail = f"{head.raw_bytes} raw bytes in {n_data} segments, this spec has {self._spec_nbytes}"
                raise CorruptRecordError("length", detail) from error
            raise
        if head.keyed and self._tags is None:
            raise CorruptRecordError("version", "the record is keyed and no key is configured")
        if head.namespace != self._namespace:
            raise CorruptRecordError("key", f"namespace {head.namespace.hex()}, expected {self._namespace.hex()}")
        key = None if self._tags is None else self._tags.authenticate(record[: head.head_bytes], keyed=head.keyed)
        if head.digest != digest:
            raise CorruptRecordError("key", f"record of block {head.digest.hex()}, asked for {digest.hex()}")
        if not fits or _constant_fields(head) != self._expected:
            detail = f"made for another block spec: {head.raw_bytes} raw bytes, fingerprint {head.fingerprint.hex()}"
            raise CorruptRecordError("spec", detail)
        return table, key

    def _verify_segments(self, record: memoryview, head: Head, table: list[tuple[int, int, int]]) -> list[memoryview]:
        lengths = (*self._raw_lengths, 4 * head.block_tokens) if head.flags & FLAG_TOKEN_IDS else self._raw_lengths
        stored: list[memoryview] = []
        start = len(record) - head.stored_bytes
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
        opened: list[tuple[SegmentGeometry, OpenSegment]]
        codec = self._codec_of(head)
        if codec.seals:
            opened = [(g, codec.open_segment(piece, g)) for g, piece in zip(self._plan, stored, strict=True)]
            return OpenBlock(head, None, None, opened)
        if head.stored_bytes - len(token_ids or b"") == self._spec_nbytes:  # all raw: the payload is the block
            start = len(record) - head.stored_bytes
            return OpenBlock(head, token_ids, record[start : start + self._spec_nbytes], [])
        opened = []
        for geometry, piece in zip(self._plan, stored, strict=True):
            raw = len(piece) == geometry.raw_bytes
            opened.append((geometry, RawSegment(piece) if raw else codec.open_segment(piece, geometry)))
        return OpenBlock(head, token_ids, None, opened)

    def _codec_of(self, head: Head) -> Codec:
        """The codec of a verified record, told which block comes if it seals.

        Raises:
            CorruptRecordError: ``codec``.
        """
        codec = self._codec(head.codec_id)
        if codec.seals != head.sealed:
            says = "is" if head.sealed else "is not"
            raise CorruptRecordError("codec", f"the record {says} sealed, which does not go with codec {codec.name!r}")
        if codec.seals:
            codec.begin(self._namespace, head.digest)
        return codec

    def _codec(self, codec_id: int) -> Codec:
        codec = self._codecs.get(codec_id)
        if codec is None:
            codec = NoneCodec() if codec_id == NoneCodec.codec_id else self._find_codec(codec_id)
            if codec is None:
                raise CorruptRecordError("codec", f"no codec of id {codec_id} is installed")
            self._codecs[codec_id] = codec
        return codec


def _no_payload(record: memoryview, digest: bytes) -> memoryview | None:  # noqa: ARG001 - as of PlainRecords
    return None

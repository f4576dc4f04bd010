"""The record: what is stored under a name on any medium, byte for byte (little-endian).

A record is a head (192-byte header, then one 16-byte entry per segment) and a payload (the stored
segments one after the other).  ``docs/reference/record-format.md`` has the table of offsets.  This
module knows the bytes of a record; what they mean for a block is the business of
:mod:`kvstore.blocks`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.errors import CorruptRecordError
from kvstore.keyring import Keyring
from kvstore.record_tags import RecordTags, check_segment, put_head_tag, segment_tags
from kvstore.segments import MAX_SEAL_BYTES

MAGIC: Final = b"KVB\x01"
FORMAT_VERSION: Final = 1
READABLE_VERSIONS: Final = frozenset({FORMAT_VERSION})
"""Versions this release reads: its own and the one before it.  Version 1 is the first, so alone."""

HEADER_BYTES: Final = 192
MAX_SEGMENTS: Final = 1 << 16
"""Bound on ``n_segments``; a 4 GiB block, the largest there is, has about 25,000."""

FLAG_PARENT_UNKNOWN: Final = 1 << 0
FLAG_TOKEN_IDS: Final = 1 << 1
FLAG_KEYED: Final = 1 << 2
FLAG_SEALED: Final = 1 << 3
_KNOWN_FLAGS: Final = FLAG_PARENT_UNKNOWN | FLAG_TOKEN_IDS | FLAG_KEYED | FLAG_SEALED

ENTRY_BYTES: Final = 16
KEYED_ENTRY_BYTES: Final = 32
"""Rows of the segment table; those of keyed records end with a tag."""

_HEADER: Final = struct.Struct("<4sHHIHBB16s32s32s16sIIIIQQQ16s16sQ")
_ENTRY: Final = struct.Struct("<IIQ")
_KEYED_ENTRY: Final = struct.Struct("<IIQ16x")
_CHECKSUM_OFFSET: Final = 184
_COPIED_BYTES: Final = 16 << 10  # a table up to that size is copied for its checksum, which is faster
_U64: Final = struct.Struct("<Q")

_ZEROS_8: Final = bytes(8)
_ZEROS_16: Final = bytes(16)
_ZEROS_32: Final = bytes(32)
_U32_END: Final = 1 << 32


class SegmentEntry(NamedTuple):
    """One row of the segment table; ``stored_bytes == raw_bytes`` means stored raw, unless the record is sealed."""

    stored_bytes: int
    raw_bytes: int
    checksum: int
    tag: bytes = b""


class Head(NamedTuple):
    """Every field of a header, in the order of the bytes."""

    magic: bytes
    format_version: int
    header_bytes: int
    flags: int
    codec_id: int
    dtype_id: int
    layout_id: int
    namespace: bytes
    digest: bytes
    parent: bytes
    fingerprint: bytes
    block_index: int
    block_tokens: int
    group: int
    n_segments: int
    raw_bytes: int
    stored_bytes: int
    created: int
    tag: bytes
    reserved: bytes
    checksum: int

    @property
    def keyed(self) -> bool:
        """Whether table and header carry authentication tags."""
        return bool(self.flags & FLAG_KEYED)

    @property
    def sealed(self) -> bool:
        """Whether every segment went through a codec that hides what it holds."""
        return bool(self.flags & FLAG_SEALED)

    @property
    def has_token_ids(self) -> bool:
        """Whether the last segment holds the block's token ids instead of block bytes."""
        return bool(self.flags & FLAG_TOKEN_IDS)

    @property
    def parent_known(self) -> bool:
        """Whether ``parent`` says something: the digest before this block, zeros for a first block."""
        return not self.flags & FLAG_PARENT_UNKNOWN

    @property
    def head_bytes(self) -> int:
        """Length of header and segment table; the payload starts there."""
        return self.header_bytes + self.n_segments * (KEYED_ENTRY_BYTES if self.flags & FLAG_KEYED else ENTRY_BYTES)

    @property
    def record_bytes(self) -> int:
        """Length of the whole record."""
        return self.head_bytes + self.stored_bytes


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """Where a block stands: what a record tells besides the block's bytes.

    Attributes:
        digest: 32 bytes that name the block.
        parent: 32-byte digest of the block before it; None for a sequence's first block.
        block_index: Index of the block in its sequence, below 2**32; 0 when unknown.
        group: KV group of hybrid models, below 2**32; 0 otherwise.
        token_ids: The block's tokens as little-endian u32, or None when they are not kept.
        parent_known: False when ``parent`` (then None) and ``block_index`` say nothing, as for
            chained block hashes that stand alone.

    Raises:
        ValueError: A field has the wrong length or is out of range.
    """

    digest: bytes
    parent: bytes | None = None
    block_index: int = 0
    group: int = 0
    token_ids: bytes | None = None
    parent_known: bool = True

    def __post_init__(self) -> None:
        for name in ("digest", "parent"):
            value = getattr(self, name)
            if len(value or _ZEROS_32) != 32:
                msg = f"RecordMeta.{name} has {len(value)} bytes; expected a digest of 32 bytes"
                raise ValueError(msg)
        for name in ("block_index", "group"):
            if not 0 <= getattr(self, name) < _U32_END:
                msg = f"RecordMeta.{name} is {getattr(self, name)}; expected 0 to {_U32_END - 1}"
                raise ValueError(msg)
        if self.parent is not None and not self.parent_known:
            raise ValueError("RecordMeta.parent is given but parent_known is False; give one or the other")
        if self.token_ids is not None and (len(self.token_ids) == 0 or len(self.token_ids) % 4):
            msg = f"RecordMeta.token_ids has {len(self.token_ids)} bytes; expected 4 for each token"
            raise ValueError(msg)


def unpack_head(view: memoryview) -> Head:
    """Unpack a header without judging it; see :func:`check_structure`.

    Raises:
        CorruptRecordError: ``length``, when there is no whole header.
    """
    if len(view) < HEADER_BYTES:
        raise CorruptRecordError("length", f"{len(view)} bytes, a header takes {HEADER_BYTES}")
    return Head._make(_HEADER.unpack_from(view))


def check_structure(view: memoryview, head: Head, record_bytes: int | None = None) -> None:
    """Check everything that keeps a reader inside its bounds; allocates nothing.

    The checksum is not looked at, so the fields may still be wrong; see :func:`verify_head`.

    Args:
        view: The record, or at least its head.
        head: What :func:`unpack_head` returned for ``view``.
        record_bytes: Length of the whole record when ``view`` is only its head.

    Raises:
        CorruptRecordError: ``magic``, ``version`` or ``length``.
    """
    if head.magic != MAGIC:
        raise CorruptRecordError("magic", f"starts with {head.magic!r}, not {MAGIC!r}")
    if head.format_version not in READABLE_VERSIONS:
        raise CorruptRecordError("version", f"format {head.format_version}, this release reads {FORMAT_VERSION}")
    if head.flags & ~_KNOWN_FLAGS:
        raise CorruptRecordError("version", f"flags {head.flags:#x} have bits that format {FORMAT_VERSION} does not")
    if head.sealed and head.has_token_ids:
        raise CorruptRecordError("version", "a sealed record has the token ids that it is to hide")
    least = 2 if head.has_token_ids else 1
    if head.header_bytes != HEADER_BYTES or not least <= head.n_segments <= MAX_SEGMENTS:
        detail = f"header of {head.header_bytes} bytes with {head.n_segments} segments is out of bounds"
        raise CorruptRecordError("length", detail)
    total = len(view) if record_bytes is None else record_bytes
    if head.head_bytes > len(view) or head.record_bytes != total:
        detail = f"{total} bytes, the header says {head.head_bytes} + {head.stored_bytes}"
        raise CorruptRecordError("length", detail)
    if not 1 <= head.raw_bytes < _U32_END:
        raise CorruptRecordError("length", f"a raw block of {head.raw_bytes} bytes is out of bounds")


def verify_head(view: memoryview, head: Head) -> list[tuple[int, int, int]]:
    """Check the header checksum, which also seals the segment table, then the table itself.

    Args:
        view: The record, or at least its head.
        head: What :func:`unpack_head` returned for ``view``, with its structure checked.

    Returns:
        ``(stored_bytes, raw_bytes, checksum)`` of each segment, the token ids' last.

    Raises:
        CorruptRecordError: ``checksum``; ``length`` when the table contradicts the header;
            ``version`` when bytes that this format keeps zero are in use.
    """
    table = list(_checked_rows(view, head))
    _check_table(table, head)
    return table


def check_head(view: memoryview, head: Head) -> None:
    """Check all that :func:`verify_head` does where nobody needs the table; takes no memory for its rows.

    Raises:
        CorruptRecordError: As :func:`verify_head`.
    """
    _check_table(_checked_rows(view, head), head)


def _checked_rows(view: memoryview, head: Head) -> Iterator[tuple[int, int, int]]:
    """The rows of a table that matches the header checksum."""
    keyed = head.flags & FLAG_KEYED
    entry = _KEYED_ENTRY if keyed else _ENTRY
    table_view = view[HEADER_BYTES : HEADER_BYTES + head.n_segments * entry.size]
    if _header_checksum(view[:_CHECKSUM_OFFSET], table_view) != head.checksum:
        raise CorruptRecordError("checksum", "header and segment table do not match the header checksum")
    if head.reserved != _ZEROS_16 or (head.tag != _ZEROS_16 and not keyed):
        raise CorruptRecordError("version", f"reserved bytes are in use; format {FORMAT_VERSION} keeps them zero")
    rows: Iterator[tuple[int, int, int]] = entry.iter_unpack(table_view)
    return rows


def parse_head(view: memoryview, record_bytes: int | None = None) -> Head:
    """Read the head of any sound record, without knowing its spec; the payload is not looked at.

    Args:
        view: The record, or at least its head.
        record_bytes: Length of the whole record when ``view`` is only its head.

    Raises:
        CorruptRecordError: The head fails verification.
    """
    head = unpack_head(view)
    check_structure(view, head, record_bytes)
    check_head(view, head)
    return head


def verify_record(view: memoryview, keys: Keyring | None = None) -> Head:
    """Check all that can be checked without the spec: structure and every checksum, and the tags with ``keys``.

    Args:
        view: The whole record.
        keys: Some key of these must have made the record for the namespace it names; None to leave
            the tags alone.

    Raises:
        CorruptRecordError: The record fails verification; ``tag`` when it is not keyed, or not with ``keys``.
    """
    head = unpack_head(view)
    check_structure(view, head)
    table = verify_head(view, head)
    start = view[: head.head_bytes]
    key = None if keys is None else RecordTags(keys, head.namespace).authenticate(start, keyed=head.keyed)
    tags = segment_tags(start) if key else ()
    offset = head.head_bytes
    for index, (stored_bytes, _, checksum) in enumerate(table):
        stored = view[offset : offset + stored_bytes]
        verify_segment(stored, checksum, index)
        if key:
            check_segment(key, tags[index], stored, index)
        offset += stored_bytes
    return head


def verify_segment(stored: memoryview, checksum: int, index: int) -> None:
    """Check one stored segment against its entry in the segment table.

    Raises:
        CorruptRecordError: ``checksum``.
    """
    if xxh3_64_intdigest(stored) != checksum:
        raise CorruptRecordError("checksum", f"segment {index} does not match its checksum")


def pack_head(head: Head, segments: Sequence[SegmentEntry], key: bytes | None = None) -> tuple[bytes, int]:
    """Serialize a head: append the segment table, fill in the checksum and, with a key, the tag.

    Args:
        head: The header's fields; ``checksum`` is ignored.
        segments: The segment table, ``head.n_segments`` rows, with tags for a keyed record.
        key: Of a keyed record.

    Returns:
        The head's bytes and its header checksum.
    """
    packed = bytearray(_HEADER.pack(*head))
    for entry in segments:
        packed += _ENTRY.pack(entry.stored_bytes, entry.raw_bytes, entry.checksum) + entry.tag
    if key is not None:
        put_head_tag(key, packed)
    with memoryview(packed) as view:
        checksum = _header_checksum(view[:_CHECKSUM_OFFSET], view[HEADER_BYTES:])
    _U64.pack_into(packed, _CHECKSUM_OFFSET, checksum)
    return bytes(packed), checksum


def _check_table(table: Iterable[tuple[int, int, int]], head: Head) -> None:
    stored_total = raw_total = stored_bytes = raw_bytes = 0
    more = MAX_SEAL_BYTES if head.sealed else 0
    for stored_bytes, raw_bytes, _ in table:
        if not 0 < stored_bytes <= raw_bytes + more or not raw_bytes:
            raise CorruptRecordError("length", f"a segment of {raw_bytes} raw bytes cannot take {stored_bytes}")
        stored_total += stored_bytes
        raw_total += raw_bytes
    if head.has_token_ids:
        raw_total -= raw_bytes  # the last row
        if stored_bytes != raw_bytes or raw_bytes != 4 * head.block_tokens:
            detail = f"token ids take {stored_bytes} bytes, {head.block_tokens} tokens need {4 * head.block_tokens}"
            raise CorruptRecordError("length", detail)
    if stored_total != head.stored_bytes or raw_total != head.raw_bytes:
        detail = f"segments add up to {stored_total} stored and {raw_total} raw bytes, the header says otherwise"
        raise CorruptRecordError("length", detail)


def _header_checksum(fields: memoryview, table: memoryview) -> int:
    if len(table) <= _COPIED_BYTES:
        return xxh3_64_intdigest(b"".join((fields, _ZEROS_8, table)))
    checksum = xxh3_64(fields)
    checksum.update(_ZEROS_8)
    checksum.update(table)
    return checksum.intdigest()

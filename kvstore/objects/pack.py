"""The pack: what one object holds, byte for byte; see ``docs/reference/pack-format.md``.

A pack is a header, an index and the records one after the other, all numbers little-endian.  The
reader trusts nothing: every length is checked against the object's own length before anything is
allocated, then the checksum, then that the records fill the object without gap or overlap.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.backend import PutItem, RecordInfo
from kvstore.objects.medium import ObjectBody
from kvstore.record import HEADER_BYTES as RECORD_HEADER_BYTES
from kvstore.record import MAGIC as RECORD_MAGIC

MAGIC: Final = b"KVP\x01"
PACK_VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHHIIQQ")
_SEALED: Final = HEADER.size - 8  # what the checksum covers of the header: all before itself
_ENTRY: Final = struct.Struct("<QQIHH")
_MAX_RECORDS: Final = 1 << 16
_MAX_NAME_BYTES: Final = 255
_CODEC_UNKNOWN: Final = 0xFFFF


class PackError(Exception):
    """An object is not a sound pack; the engine treats it as absent and removes it."""


class Entry(NamedTuple):
    """One record of a pack: where it lies and what it is."""

    name: bytes
    offset: int
    nbytes: int
    head_bytes: int
    codec_id: int

    @property
    def end(self) -> int:
        """Offset of the byte after the record."""
        return self.offset + self.nbytes

    def info(self, name: bytes, last_use: float = 0.0) -> RecordInfo:
        """The entry in the words of the backend contract."""
        return RecordInfo(name, self.head_bytes, self.nbytes - self.head_bytes, self.codec_id, last_use)


@dataclass(frozen=True, slots=True)
class PackHeader:
    """The first 32 bytes of a pack, checked against the object's length but not yet against the checksum.

    Attributes:
        records: Records inside.
        index_bytes: Length of the index after the header.
        object_bytes: Length of the whole object.
        checksum: xxh3_64 over the header before it and the index.
        sealed: The bytes of the header that the checksum covers.
    """

    records: int
    index_bytes: int
    object_bytes: int
    checksum: int
    sealed: bytes

    @property
    def records_at(self) -> int:
        """Offset of the first record."""
        return HEADER.size + self.index_bytes


def index_room(records: int, name_bytes: int = 49) -> int:
    """Length of header and index of a pack of records whose names have that length."""
    return HEADER.size + records * (_ENTRY.size + name_bytes)


def seal(items: Sequence[PutItem]) -> bytes:
    """Make header and index of a pack that holds the items in this order."""
    names = b"".join(item.name for item in items)
    index_bytes = _ENTRY.size * len(items) + len(names)
    offset = HEADER.size + index_bytes
    entries = bytearray()
    for item in items:
        nbytes = item.nbytes
        head_bytes = item.head_bytes or (memoryview(item.buffers[0]).nbytes if item.buffers else 0)
        entries += _ENTRY.pack(offset, nbytes, min(head_bytes, nbytes), _codec_id(item), len(item.name))
        offset += nbytes
    index = bytes(entries) + names
    sealed = HEADER.pack(MAGIC, PACK_VERSION, 0, len(items), index_bytes, offset, 0)[:_SEALED]
    return sealed + xxh3_64_intdigest(sealed + index).to_bytes(8, "little") + index


def _codec_id(item: PutItem) -> int:
    head = memoryview(item.buffers[0])[:RECORD_HEADER_BYTES] if item.buffers else memoryview(b"")
    if head.nbytes < RECORD_HEADER_BYTES or bytes(head[:4]) != RECORD_MAGIC:
        return _CODEC_UNKNOWN
    return int.from_bytes(head[12:14], "little")  # the record format's codec field


def parse_header(data: bytes | bytearray | memoryview, object_bytes: int | None) -> PackHeader:
    """Check the start of an object.

    Args:
        data: At least its first 32 bytes, or all of a shorter one.
        object_bytes: The length the medium reports; None when only a range was read and it is not
            known, then the header is believed and whoever reads a record finds out.

    Raises:
        PackError: It is no pack of that length.
    """
    if len(data) < HEADER.size:
        msg = f"{len(data)} bytes, a pack's header takes {HEADER.size}"
        raise PackError(msg)
    magic, version, flags, records, index_bytes, length, checksum = HEADER.unpack_from(data)
    if magic != MAGIC or version != PACK_VERSION or flags:
        msg = f"starts with {magic!r}, version {version}, flags {flags:#x}; expected {MAGIC!r}, {PACK_VERSION}, 0"
        raise PackError(msg)
    if object_bytes is not None and length != object_bytes:
        msg = f"{object_bytes} bytes, the header says {length}"
        raise PackError(msg)
    least = records * (_ENTRY.size + 1)
    most = min(records * (_ENTRY.size + _MAX_NAME_BYTES), length - HEADER.size)
    if not 1 <= records <= _MAX_RECORDS or not least <= index_bytes <= most:
        msg = f"{records} records with an index of {index_bytes} bytes are out of bounds"
        raise PackError(msg)
    return PackHeader(records, index_bytes, length, checksum, bytes(data[:_SEALED]))


def parse_index(header: PackHeader, index: bytes | bytearray) -> list[Entry]:
    """Check and read the index that follows a header.

    Raises:
        PackError: Checksum, names or offsets are wrong.
    """
    if xxh3_64_intdigest(header.sealed + index) != header.checksum:
        msg = "header and index do not match their checksum"
        raise PackError(msg)
    entries: list[Entry] = []
    name_at = header.records * _ENTRY.size
    offset = header.records_at
    for at, nbytes, head_bytes, codec_id, name_bytes in _ENTRY.iter_unpack(memoryview(index)[:name_at]):
        name = bytes(index[name_at : name_at + name_bytes])
        if at != offset or head_bytes > nbytes or len(name) != name_bytes or not 1 <= name_bytes <= _MAX_NAME_BYTES:
            msg = f"entry {len(entries)} of the index contradicts the others"
            raise PackError(msg)
        entries.append(Entry(name, at, nbytes, head_bytes, -1 if codec_id == _CODEC_UNKNOWN else codec_id))
        name_at += name_bytes
        offset += nbytes
    if name_at != header.index_bytes or offset != header.object_bytes:
        msg = f"records end at {offset} of {header.object_bytes} bytes, names at {name_at} of {header.index_bytes}"
        raise PackError(msg)
    return entries


def read_header(body: ObjectBody, object_bytes: int | None) -> PackHeader:
    """Read the header from the start of a body.

    Raises:
        PackError: It is no sound pack.
        BackendError: The medium failed.
    """
    start = bytearray(min(HEADER.size, body.nbytes))
    body.read_into(memoryview(start))
    return parse_header(start, object_bytes)


def read_entries(body: ObjectBody, header: PackHeader) -> list[Entry]:
    """Read the index that follows the header which was just read.

    Raises:
        PackError: It is no sound pack, or the body ends within its index.
        BackendError: The medium failed.
    """
    if header.records_at > body.nbytes:
        msg = f"an index of {header.index_bytes} bytes does not fit the {body.nbytes} bytes that were read"
        raise PackError(msg)
    index = bytearray(header.index_bytes)
    body.read_into(memoryview(index))
    return parse_index(header, index)


def read_index(body: ObjectBody, object_bytes: int | None) -> list[Entry]:
    """Read header and index from the start of a body; see :func:`read_header` and :func:`read_entries`."""
    return read_entries(body, read_header(body, object_bytes))

"""What the index says about a record, so that neither reads nor evictions touch payload."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvstore.backend import PutItem, RecordInfo

_ENTRY_1: Final = struct.Struct(">QIIh")  # store format 1; all of the line
_ENTRY: Final = struct.Struct(">QIIhQ")  # store format 2; the parent's name follows
_HEAD: Final = struct.Struct("<4sHHIH")  # magic, format version, header length, flags, codec
_MAGIC: Final = b"KVB\x01"
SEQUENCE_BYTES: Final = 8
_MAX_U64: Final = (1 << 64) - 1
MAX_RECORD_BYTES: Final = (1 << 32) - 1  # liblmdb's own limit of a value
MAX_PARENT_BYTES: Final = 255  # longest name that the contract promises; with a prefix it is a key, too


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the index.

    Attributes:
        sequence: Place in the recency order, larger is more recent; Unix microseconds of the last
            use, raised where needed so that it always grows.
        nbytes: Length of the record.
        head_bytes: Length of its head.
        codec_id: Codec named in the head; -1 when the record is not in kvstore's format.
        children_bytes: Length of the live records whose parent this one is.
        parent: Name of the record of the block before; empty for a first or unknown one, and in
            lines that store format 1 wrote.
    """

    sequence: int
    nbytes: int
    head_bytes: int
    codec_id: int
    children_bytes: int = 0
    parent: bytes = b""

    @classmethod
    def of(cls, item: PutItem, nbytes: int, sequence: int) -> Entry:
        """Describe a record of ``nbytes`` that is about to be stored."""
        head = memoryview(item.buffers[0]) if item.buffers else memoryview(b"")
        codec_id = -1
        if head.nbytes >= _HEAD.size:
            magic, _, _, _, codec = _HEAD.unpack_from(head)
            codec_id = codec if magic == _MAGIC and codec < 1 << 15 else -1
        parent = item.hint.parent if len(item.hint.parent) <= MAX_PARENT_BYTES else b""
        return cls(sequence, nbytes, item.head_bytes or head.nbytes, codec_id, parent=parent)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Entry:
        """Read what :meth:`pack` wrote, in this or an older store format.

        A line that no store format has is one of an empty record, so that it can be evicted.
        """
        if len(data) < _ENTRY.size:
            return cls(*_ENTRY_1.unpack(data)) if len(data) == _ENTRY_1.size else cls(0, 0, 0, -1)
        sequence, nbytes, head_bytes, codec_id, children_bytes = _ENTRY.unpack_from(data)
        parent = bytes(data[_ENTRY.size :]) if len(data) <= _ENTRY.size + MAX_PARENT_BYTES else b""
        return cls(sequence, nbytes, head_bytes, codec_id, children_bytes, parent)

    def pack(self, *, children_bytes: int) -> bytes:
        """Return the line for the index."""
        counted = min(children_bytes, _MAX_U64)
        return _ENTRY.pack(self.sequence, self.nbytes, self.head_bytes, self.codec_id, counted) + self.parent

    def info(self, name: bytes) -> RecordInfo:
        """Return the public description."""
        head_bytes = min(self.head_bytes, self.nbytes)
        return RecordInfo(name, head_bytes, self.nbytes - head_bytes, self.codec_id, self.sequence / 1e6)


def refreshed(line: bytes, sequence: int) -> bytes:
    """Return an index line with another sequence number, whatever its format."""
    return sequence_key(sequence) + line[SEQUENCE_BYTES:]


def sequence_of(line: bytes) -> int:
    """Return the sequence number of an index line."""
    return int.from_bytes(line[:SEQUENCE_BYTES], "big")


def sequence_key(sequence: int) -> bytes:
    """Return the key of a sequence number in the recency tree: as bytes it sorts as a number."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")

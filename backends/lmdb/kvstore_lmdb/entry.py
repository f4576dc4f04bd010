"""What the index says about a record: 18 bytes, so that neither reads nor evictions touch payload."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvstore.backend import PutItem, RecordInfo

_ENTRY: Final = struct.Struct(">QIIh")
_HEAD: Final = struct.Struct("<4sHHIH")  # magic, format version, header length, flags, codec
_MAGIC: Final = b"KVB\x01"
SEQUENCE_BYTES: Final = 8
MAX_RECORD_BYTES: Final = (1 << 32) - 1  # liblmdb's own limit of a value


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the index.

    Attributes:
        sequence: Place in the recency order, larger is more recent; Unix microseconds of the last
            use, raised where needed so that it always grows.
        nbytes: Length of the record.
        head_bytes: Length of its head.
        codec_id: Codec named in the head; -1 when the record is not in kvstore's format.
    """

    sequence: int
    nbytes: int
    head_bytes: int
    codec_id: int

    @classmethod
    def of(cls, item: PutItem, nbytes: int, sequence: int) -> Entry:
        """Describe a record of ``nbytes`` that is about to be stored."""
        head = memoryview(item.buffers[0]) if item.buffers else memoryview(b"")
        codec_id = -1
        if head.nbytes >= _HEAD.size:
            magic, _, _, _, codec = _HEAD.unpack_from(head)
            codec_id = codec if magic == _MAGIC and codec < 1 << 15 else -1
        return cls(sequence, nbytes, item.head_bytes or head.nbytes, codec_id)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Entry:
        """Read what :meth:`pack` wrote."""
        return cls(*_ENTRY.unpack(data))

    def pack(self) -> bytes:
        """Return the value for the index."""
        return _ENTRY.pack(self.sequence, self.nbytes, self.head_bytes, self.codec_id)

    def info(self, name: bytes) -> RecordInfo:
        """Return the public description."""
        return RecordInfo(name, self.head_bytes, self.nbytes - self.head_bytes, self.codec_id, self.sequence / 1e6)


def sequence_key(sequence: int) -> bytes:
    """Return the key of a sequence number in the recency tree: as bytes it sorts as a number."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")

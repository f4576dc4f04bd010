"""A record on disk: one page of slot header and head, then the payload.

The page starts with the slot header and the record's name, and ends with the first
``front_bytes`` of the record, usually its whole head.  The rest follows in the next pages, so that
the record is contiguous on disk and payload starts on a page boundary::

    | slot header | name |  ...free...  | front of the record || rest of the record | padding |
    0                                                       4096

All numbers are little-endian.  The checksum (XXH3-64) covers the header and the name; what is
inside the record is the business of the record's own checksums.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.backend import PutItem

PAGE_BYTES: Final = 4096
"""Unit of space and alignment: the largest logical block of current disks."""

MAX_NAME_BYTES: Final = 255
SLOT_MAGIC: Final = b"KVS\x01"
# magic, name length, flags (0), front, head, record length, generation, sequence, parent tag, codec, reserved
_HEADER: Final = struct.Struct("<4sHHIIQQQQi4x")
_CHECKSUM: Final = struct.Struct("<Q")
_NAME_AT: Final = _HEADER.size + _CHECKSUM.size
_RECORD_HEAD: Final = struct.Struct("<4sHHIH")  # magic, format version, header length, flags, codec
_RECORD_MAGIC: Final = b"KVB\x01"
_NEVER: Final = 1 << 63  # the clock of sequences and generations goes on from the largest one found


@dataclass(slots=True)
class Slot:
    """What the slot header says; generation and sequence are given when the slot gets its place.

    Attributes:
        name: Stored name.
        nbytes: Length of the record.
        head_bytes: Length of its head, as announced by the writer.
        front_bytes: How many of its bytes stand at the end of the page.
        generation: Which use of the region the slot belongs to.
        sequence: Unix microseconds of the write, raised where needed so that it grows within a region.
        parent_tag: XXH3-64 of the name of the previous block; 0 when unknown or none.
        codec_id: Codec of the record; -1 when it is not in kvstore's format.
    """

    name: bytes
    nbytes: int
    head_bytes: int
    front_bytes: int
    generation: int = 0
    sequence: int = 0
    parent_tag: int = 0
    codec_id: int = -1

    @property
    def rest_bytes(self) -> int:
        """Bytes after the page."""
        return self.nbytes - self.front_bytes

    @property
    def pages(self) -> int:
        """Pages that the slot takes."""
        return 1 + -(-self.rest_bytes // PAGE_BYTES)

    @classmethod
    def of(cls, item: PutItem) -> Slot:
        """Describe a record that is about to be written."""
        nbytes = item.nbytes
        head_bytes = _head_bytes(item, nbytes)
        front = _front_bytes(len(item.name), nbytes, head_bytes)
        parent = tag_of(item.hint.parent) if item.hint.parent else 0
        return cls(item.name, nbytes, head_bytes, front, 0, 0, parent, _codec_of(item))

    def pack_into(self, page: memoryview) -> None:
        """Write header and name to the start of ``page`` and zeros up to the front."""
        header = _HEADER.pack(
            *(SLOT_MAGIC, len(self.name), 0, self.front_bytes, self.head_bytes, self.nbytes),
            *(self.generation, self.sequence, self.parent_tag, self.codec_id),
        )
        checksum = _CHECKSUM.pack(xxh3_64_intdigest(header + self.name))
        text = header + checksum + self.name
        page[: PAGE_BYTES - self.front_bytes] = text.ljust(PAGE_BYTES - self.front_bytes, b"\0")

    @classmethod
    def parse(cls, page: memoryview) -> Slot | None:
        """Read the header at the start of ``page``; None when there is no sound one."""
        if bytes(page[:4]) != SLOT_MAGIC or page.nbytes < PAGE_BYTES:
            return None
        _, name_bytes, flags, front, head, nbytes, generation, sequence, parent, codec = _HEADER.unpack_from(page)
        name = bytes(page[_NAME_AT : _NAME_AT + name_bytes])
        if _CHECKSUM.unpack_from(page, _HEADER.size)[0] != xxh3_64_intdigest(bytes(page[: _HEADER.size]) + name):
            return None
        sound = 1 <= name_bytes <= MAX_NAME_BYTES and not flags and front <= min(nbytes, room_of(name_bytes))
        # What the index can hold, so that no slot, however it came about, stops a scan.
        sound = sound and head <= nbytes < 1 << 32 and -1 <= codec < 1 << 15
        sound = sound and generation < _NEVER and sequence < _NEVER
        return cls(name, nbytes, head, front, generation, sequence, parent, codec) if sound else None


def tag_of(name: bytes) -> int:
    """Return the number that stands for a name where eight bytes must do."""
    return xxh3_64_intdigest(name)


def is_slot_of(page: memoryview, name: bytes, sequence: int, lengths: tuple[int, int]) -> bool:
    """Whether a page is the first of just that slot; ``lengths`` are of the record and of its front."""
    magic, _, _, front, _, nbytes, _, found, _, _ = _HEADER.unpack_from(page)
    return (
        magic == SLOT_MAGIC
        and (found, nbytes, front) == (sequence, *lengths)
        and page[_NAME_AT : _NAME_AT + len(name)] == name
        and _CHECKSUM.unpack_from(page, _HEADER.size)[0] == xxh3_64_intdigest(bytes(page[: _HEADER.size]) + name)
    )


def room_of(name_bytes: int) -> int:
    """Return how many bytes of a record fit into the page beside a name of that length."""
    return PAGE_BYTES - _NAME_AT - name_bytes


def _front_bytes(name_bytes: int, nbytes: int, head_bytes: int) -> int:
    """Return how many bytes of a record go into the page: all of a tiny one, else the head if it fits."""
    room = room_of(name_bytes)
    if nbytes <= room:
        return nbytes
    return head_bytes if head_bytes <= room else 0


def _head_bytes(item: PutItem, nbytes: int) -> int:
    """Return the length of a record's head, never more than the record's."""
    if item.head_bytes or not item.buffers:
        return min(item.head_bytes, nbytes)
    return memoryview(item.buffers[0]).nbytes


def _codec_of(item: PutItem) -> int:
    head = memoryview(item.buffers[0]) if item.buffers else memoryview(b"")
    if head.nbytes < _RECORD_HEAD.size:
        return -1
    magic, _, _, _, codec = _RECORD_HEAD.unpack_from(head)
    return int(codec) if magic == _RECORD_MAGIC and codec < 1 << 15 else -1

"""Structured damage: what bit rot, torn writes and forgers do to a record, as often as asked for.

Everything is decided by one :class:`random.Random`, so a seed repeats it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

import xxhash
import zstandard

from kvstore.record_tags import RecordTags, head_tag, segment_tag
from tests.fuzz.reference import HEADER_BYTES, field, row_bytes, rows, segments
from tests.fuzz.worlds import FOREIGN_RING, KNOWN, UNKNOWN, World
from tests.unit.record.conftest import FIELDS

_SIZES: Final = {"<B": 1, "<H": 2, "<I": 4, "<Q": 8, "<4s": 4, "<16s": 16, "<32s": 32}
_NUMBERS: Final = (0, 1, 2, 3, 4, 5, 8, 15, 16, 63, 64, 191, 192, 193, 255, 256, 65_535, 65_536)
_SKIPPABLE: Final = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
FRAMES: Final = (
    bytes.fromhex("28b52ffde06c06060663636363"),  # 13 bytes that declare 7.2e18
    zstandard.compress(bytes(1024)),
    zstandard.compress(bytes(1 << 20)),
    zstandard.compress(bytes(256)) + b"\0",
    _SKIPPABLE,
    _SKIPPABLE + zstandard.compress(bytes(512)),
    zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024)),
    zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1024)),
)
_FOREIGN: Final = RecordTags(FOREIGN_RING, bytes(range(16))).writing

Mutation = Callable[[random.Random, bytes, bytes], bytes]
"""``(rng, record, another record) -> record``; the record has a whole header."""


def damaged(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """Do one to three things to a record, and make as much of it right again as a forger would."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(record) >= HEADER_BYTES:
            record = rng.choice(MUTATIONS)(rng, record, other)
    level = rng.randrange(5)
    if level and len(record) >= HEADER_BYTES:
        record = (sealed_header, refitted, refitted, foreign_tags)[level - 1](record)
    return record


def number_near(rng: random.Random, old: int, n_bytes: int) -> int:
    """A number that a careless reader stumbles over."""
    top = 1 << 8 * n_bytes
    pick = rng.randrange(6)
    if pick == 0:
        value = rng.choice(_NUMBERS)
    elif pick == 1:
        value = top - 1 - rng.randrange(3)
    elif pick == 2:
        value = (1 << rng.randrange(8 * n_bytes)) + rng.randrange(-1, 2)
    elif pick == 3:
        value = old + rng.choice((-16, -2, -1, 1, 2, 16))
    elif pick == 4:
        value = old ^ 1 << rng.randrange(8 * n_bytes)
    else:
        value = rng.randrange(top)
    return value % top


def some_field(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """Another value in one field of the header."""
    name = rng.choice(tuple(FIELDS))
    offset, form = FIELDS[name]
    size = _SIZES[form]
    old = record[offset : offset + size]
    if form.endswith("s"):
        new = rng.choice(
            (bytes(size), b"\xff" * size, rng.randbytes(size), other[offset : offset + size], KNOWN[1][:size])
        )
    else:
        new = number_near(rng, int.from_bytes(old, "little"), size).to_bytes(size, "little")
    return record[:offset] + new.ljust(size, b"\0") + record[offset + size :]


def some_row(rng: random.Random, record: bytes, _: bytes) -> bytes:
    """Another number in the segment table."""
    table = rows(record)
    if not table:
        return record
    row = rng.randrange(len(table))
    column, size = rng.choice(((0, 4), (4, 4), (8, 8), (16, 8)))
    at = HEADER_BYTES + row_bytes(record) * row + column
    old = int.from_bytes(record[at : at + size], "little")
    return record[:at] + number_near(rng, old, size).to_bytes(size, "little") + record[at + size :]


def shuffled_rows(rng: random.Random, record: bytes, _: bytes) -> bytes:
    """Rows in another order, one left out or one twice; the header says how many there are."""
    step, n = row_bytes(record), len(rows(record))
    table = [record[HEADER_BYTES + step * i : HEADER_BYTES + step * (i + 1)] for i in range(n)]
    rest = record[HEADER_BYTES + step * n :]
    change = rng.randrange(3)
    if change == 0:
        rng.shuffle(table)
    elif change == 1 and table:
        table.pop(rng.randrange(len(table)))
    elif table:
        table.append(rng.choice(table))
    return _with(record[:HEADER_BYTES], "n_segments", len(table)) + b"".join(table) + rest


def some_bits(rng: random.Random, record: bytes, _: bytes) -> bytes:
    """A few flipped bits anywhere."""
    changed = bytearray(record)
    for _i in range(rng.randrange(1, 4)):
        position = rng.randrange(8 * len(changed))
        changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def some_run(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """A run of bytes overwritten, inserted or left out."""
    start = rng.randrange(len(record))
    length = rng.choice((1, 4, 8, 16, 64, 512))
    new = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length), other[start : start + length]))
    end = start + rng.choice((0, length, len(new)))
    return record[:start] + rng.choice((new, new, b"")) + record[end:]


def another_length(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """Torn off, or followed by something."""
    if rng.randrange(2):
        return record[
            : rng.choice((0, 1, 191, 192, 193, 208, len(record) // 2, len(record) - 1, rng.randrange(len(record))))
        ]
    return record + rng.choice((b"\0", bytes(16), rng.randbytes(7), record, other))


def spliced(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """The beginning of one record and the end of another, or the one's head on the other's payload."""
    if rng.randrange(2):
        at = rng.randrange(len(record))
        return record[:at] + other[at:]
    head = HEADER_BYTES + row_bytes(record) * len(rows(record))
    return record[:head] + b"".join(segments(other))


def some_payload(rng: random.Random, record: bytes, _: bytes) -> bytes:
    """One segment replaced by something that its codec may stumble over; the table follows."""
    stored = segments(record)
    if not stored:
        return record
    i = rng.randrange(len(stored))
    old = stored[i]
    pick = rng.randrange(5)
    if pick == 0:
        new = rng.choice(FRAMES)
    elif pick == 1:  # plane codecs begin with a count and lengths
        at = 4 * rng.randrange(4)
        value = number_near(rng, int.from_bytes(old[at : at + 4], "little"), 4)
        new = old[:at] + value.to_bytes(4, "little") + old[at + 4 :]
    elif pick == 2:
        new = with_frame(old, rng.choice(FRAMES))
    elif pick == 3:
        new = old[: rng.randrange(len(old) + 1)]
    else:
        new = old + rng.randbytes(rng.randrange(1, 40))
    return with_segments(record, [*stored[:i], new, *stored[i + 1 :]])


MUTATIONS: Final[tuple[Mutation, ...]] = (
    *(some_field, some_field, some_field, some_row, some_row, shuffled_rows, some_bits, some_bits),
    *(some_run, another_length, spliced, some_payload, some_payload),
)


def with_frame(payload: bytes, frame: bytes) -> bytes:
    """Replace the first frame of a planes payload, its length too."""
    n = min(int.from_bytes(payload[:4], "little"), 3)
    lengths = [int.from_bytes(payload[4 + 4 * i : 8 + 4 * i], "little") for i in range(n)]
    start = len(payload) - sum(lengths)
    if not lengths or start < 4 + 4 * n:
        return frame
    return payload[:4] + struct.pack("<I", len(frame)) + payload[8:start] + frame + payload[start + lengths[0] :]


def with_segments(record: bytes, stored: list[bytes]) -> bytes:
    """The same record with other stored bytes; nothing but lengths is made right."""
    step, table = row_bytes(record), rows(record)
    head = bytearray(record[: HEADER_BYTES + step * len(table)])
    for i, piece in enumerate(stored):
        struct.pack_into("<I", head, HEADER_BYTES + step * i, len(piece))
    return _with(bytes(head), "stored_len", sum(map(len, stored))) + b"".join(stored)


def sealed_header(record: bytes) -> bytes:
    """Make the header checksum right."""
    n = field(record, "n_segments") * row_bytes(record)
    if n > len(record):
        n = 0
    checksum = xxhash.xxh3_64_intdigest(record[:184] + bytes(8) + record[HEADER_BYTES : HEADER_BYTES + n])
    return record[:184] + struct.pack("<Q", checksum) + record[HEADER_BYTES:]


def refitted(record: bytes) -> bytes:
    """Make every checksum and the stored length right, as far as the table leads."""
    step, stored = row_bytes(record), segments(record)
    head = bytearray(record[: HEADER_BYTES + step * len(stored)])
    for i, piece in enumerate(stored):
        struct.pack_into("<Q", head, HEADER_BYTES + step * i + 8, xxhash.xxh3_64_intdigest(piece))
    return sealed_header(_with(bytes(head), "stored_len", sum(map(len, stored))) + b"".join(stored))


def foreign_tags(record: bytes) -> bytes:
    """Make it a keyed record that somebody with another key made."""
    if field(record, "flags") & 4:
        stored = segments(record)
        head = bytearray(record[: HEADER_BYTES + 32 * len(stored)])
        for i, piece in enumerate(stored):
            at = HEADER_BYTES + 32 * i + 16
            head[at : at + 16] = segment_tag(_FOREIGN, piece)
        head[152:168] = head_tag(_FOREIGN, bytes(head))
        record = bytes(head) + record[len(head) :]
    return refitted(record)


def asked(rng: random.Random) -> bytes:
    """Which block somebody asks for: nearly always the one that was stored there."""
    return rng.choice((KNOWN[0],) * 14 + (KNOWN[1], UNKNOWN))


def base_record(rng: random.Random, world: World, records: dict[bytes, bytes]) -> bytes:
    """What the damage is done to; of a keyed world sometimes the record of somebody with another key."""
    if world.keyed and rng.randrange(8) == 0:
        return world.make(KNOWN[0], rng.randbytes(world.spec.nbytes), FOREIGN_RING)
    return records[KNOWN[0]]


def _with(record: bytes, name: str, value: int) -> bytes:
    offset, form = FIELDS[name]
    return record[:offset] + struct.pack(form, value) + record[offset + _SIZES[form] :]

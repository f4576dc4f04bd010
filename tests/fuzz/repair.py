"""Damage for each target that comes through its first line of checks: what covers the damage is made right again."""

from __future__ import annotations

import random
import struct
from typing import Final

from kvstore_nvme.slot import PAGE_BYTES
from xxhash import xxh3_64_intdigest

from tests.fuzz import mutate, seeds
from tests.fuzz.reference import HEADER_BYTES
from tests.fuzz.worlds import KNOWN, LARGE, WORLDS, sound

_SMALL: Final = tuple(i for i in range(len(WORLDS)) if i not in LARGE)
_TAR_BLOCK: Final = 512
_LMDB_PAGE: Final = 4096
_TEXT_PIECES: Final = (
    *(b"[", b"]", b"{", b"}", b'"', b"'", b"=", b".", b",", b"\n", b"#", b"\\u0000", b"\x00", b"\xff", b"\xed\xa0\x80"),
    *(
        b"nan",
        b"inf",
        b"-1",
        b"0",
        b"1e999",
        b"9" * 400,
        b"9" * 5000,
        b"0x" + b"f" * 5000,
        b"true",
        b"null",
        b"1979-05-27",
    ),
    *(
        b'"4GiB"',
        b'"1e3GiB"',
        b'"5 min"',
        b"[[l2]]\n",
        b"[l1]\n",
        b"[codecs.zstd]\n",
        b"[gate]\n",
        b"a." * 300,
        b"[" * 1200,
    ),
    *(
        b"capacity = ",
        b"deadline = ",
        b"codec = ",
        b'backend = "memory"\n',
        b'"layers": [0, 1]',
        b'"model": ""',
        b"\xf0\x9f\x94\x91",
    ),
)


def plain(rng: random.Random, data: bytes) -> bytes:
    """Flip, overwrite, insert, leave out."""
    data = data or b"\0"
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = rng.choice((mutate.some_bits, mutate.some_run, mutate.another_length))
        data = change(rng, data or b"\0", data[::-1])
    return data


def text(rng: random.Random, data: bytes) -> bytes:
    """Pieces of syntax put in or over, lines left out or twice."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        pick = rng.randrange(4)
        if pick == 0:
            data = plain(rng, data)
        elif pick == 1:
            lines = data.splitlines(keepends=True)
            rng.shuffle(lines)
            data = b"".join(lines[rng.randrange(2) :])
        else:
            data = data[:at] + rng.choice(_TEXT_PIECES) + data[at + rng.choice((0, 0, 1, 8)) :]
    return data


def record(rng: random.Random, data: bytes) -> bytes:
    """See :func:`tests.fuzz.mutate.damaged`."""
    if len(data) < 2 + HEADER_BYTES or rng.randrange(8) == 0:
        return bytes((rng.choice(_SMALL), 0)) + sound(rng.choice(_SMALL)).records[KNOWN[0]]
    other = sound(rng.choice(_SMALL)).records[rng.choice(KNOWN)]
    selector = bytes((data[0], rng.choice((data[1], rng.randrange(3)))))
    return selector + mutate.damaged(rng, data[2:], other)


def coded(rng: random.Random, data: bytes) -> bytes:
    """Coded bytes as a forger would change them."""
    head, stored = data[:3].ljust(3, b"\0"), data[3:]
    if rng.randrange(4) == 0:
        head = bytes((rng.randrange(5), rng.choice(_SMALL), rng.choice((0, 1, 3, 5, 7, 9))))
    pick = rng.randrange(4)
    if pick == 0:
        stored = mutate.with_frame(stored, rng.choice(mutate.FRAMES))
    elif pick == 1:
        at = 4 * rng.randrange(4)
        value = mutate.number_near(rng, int.from_bytes(stored[at : at + 4], "little"), 4)
        stored = stored[:at] + value.to_bytes(4, "little") + stored[at + 4 :]
    else:
        stored = plain(rng, stored)
    return head + stored


def pack(rng: random.Random, data: bytes) -> bytes:
    """Damage before the records, under the right checksum and mostly the right length."""
    data = _numbers(rng, data, 32 + 24 * 3) if rng.randrange(2) else plain(rng, data)
    if len(data) < 32 or rng.randrange(4) == 0:
        return data
    if rng.randrange(2):
        data = data[:16] + struct.pack("<Q", len(data)) + data[24:]
    index_bytes = min(struct.unpack_from("<I", data, 12)[0], len(data) - 32)
    checksum = xxh3_64_intdigest(data[:24] + data[32 : 32 + index_bytes])
    return data[:24] + struct.pack("<Q", checksum) + data[32:]


def slot(rng: random.Random, data: bytes) -> bytes:
    """Damage to a slot's header, under the right checksum."""
    data = (_numbers(rng, data, 56) if rng.randrange(3) else plain(rng, data))[:PAGE_BYTES].ljust(80, b"\0")
    if rng.randrange(4) == 0:
        return data
    header = struct.calcsize("<4sHHIIQQQQi4x")
    name_bytes = struct.unpack_from("<H", data, 4)[0]
    page = data.ljust(PAGE_BYTES, b"\0")
    checksum = xxh3_64_intdigest(page[:header] + page[header + 8 : header + 8 + name_bytes])
    return data[:header] + struct.pack("<Q", checksum) + data[header + 8 :]


def lmdb_file(rng: random.Random, data: bytes) -> bytes:
    """Damage to the meta pages, to the bounds and nodes of pages, or to the length."""
    if not data or rng.randrange(16) == 0:
        return next(iter(seeds.lmdb_files()))
    pick = rng.randrange(6)
    if pick == 0:
        return data[: rng.choice((0, 100, 4096, 8192, len(data) - 4096, rng.randrange(len(data))))]
    page = rng.choice((0, 1, rng.randrange(max(1, len(data) // _LMDB_PAGE)))) * _LMDB_PAGE
    within = _numbers(rng, data[page : page + _LMDB_PAGE], rng.choice((16, 152, 400, _LMDB_PAGE)))
    if pick == 1:
        source = rng.randrange(max(1, len(data) // _LMDB_PAGE)) * _LMDB_PAGE
        within = data[source : source + _LMDB_PAGE]  # a write that went to the wrong place
    return data[:page] + within + data[page + _LMDB_PAGE :]


def archive(rng: random.Random, data: bytes) -> bytes:
    """Damage to members, with the checksum of a tar header made right."""
    data = data if len(data) >= _TAR_BLOCK else next(iter(seeds.archives()))
    at = rng.randrange(len(data) // _TAR_BLOCK) * _TAR_BLOCK
    block = data[at : at + _TAR_BLOCK]
    pick = rng.randrange(5)
    if pick == 0:
        return plain(rng, data)
    if pick == 1:  # a member twice, or elsewhere
        to = rng.randrange(len(data) // _TAR_BLOCK) * _TAR_BLOCK
        return data[:to] + block + data[to:]
    field, size = rng.choice(((0, 100), (124, 12), (156, 1), (345, 155), (257, 6), (100, 8)))
    new = rng.choice(
        (
            b"0" * size,
            b"7" * size,
            b"\xff" * size,
            b"\0" * size,
            b"-1",
            b"../../x",
            b"00000000620 ",
            rng.randbytes(size),
        )
    )
    block = block[:field] + new[:size].ljust(size, b"\0") + block[field + size :]
    if rng.randrange(4):
        total = sum(block) - sum(block[148:156]) + 8 * 32
        block = block[:148] + b"%06o\0 " % total + block[156:]
    return data[:at] + block + data[at + _TAR_BLOCK :]


def _numbers(rng: random.Random, data: bytes, most: int) -> bytes:
    """Some little-endian numbers before ``most`` overwritten."""
    for _ in range(rng.choice((1, 1, 2))):
        size = rng.choice((1, 2, 4, 8))
        at = rng.randrange(max(1, min(most, len(data)) // size)) * size
        old = int.from_bytes(data[at : at + size], "little")
        data = data[:at] + mutate.number_near(rng, old, size).to_bytes(size, "little") + data[at + size :]
    return data

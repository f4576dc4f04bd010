"""The bytes of a pack, and what a reader makes of other bytes."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.backend import PutItem
from kvstore.objects.naming import holds_records, key_of, name_of
from kvstore.objects.pack import HEADER, PackError, parse_header, parse_index, read_index, seal
from tests.unit.objects.mem import MemBody, MemMedium, chain, content

NAMES = chain("format", 4)


def pack_of(records: list[tuple[bytes, bytes]]) -> bytes:
    items = [PutItem(name, [data[:10], data[10:]]) for name, data in records]
    return seal(items) + b"".join(data for _, data in records)


def index_of(data: bytes) -> list[tuple[bytes, bytes]]:
    entries = read_index(MemBody(data, MemMedium(), "key"), len(data))
    return [(entry.name, data[entry.offset : entry.end]) for entry in entries]


GOOD = [(name, content(name, 50 + i)) for i, name in enumerate(NAMES)]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=255), st.binary(max_size=300)), min_size=1, max_size=20))
def test_what_is_packed_is_unpacked(records: list[tuple[bytes, bytes]]) -> None:
    assert index_of(pack_of(records)) == records


def test_the_bytes_are_those_of_the_reference_page() -> None:
    name, data = b"n" * 49, bytes(range(200))
    packed = pack_of([(name, data)])
    assert packed[:4] == b"KVP\x01"
    version, flags, n, index_bytes, length, checksum = struct.unpack_from("<HHIIQQ", packed, 4)
    assert (version, flags, n, index_bytes, length) == (1, 0, 1, 24 + 49, len(packed))
    assert checksum == xxh3_64_intdigest(packed[:24] + packed[32 : 32 + index_bytes])
    assert struct.unpack_from("<QQIHH", packed, 32) == (32 + index_bytes, 200, 10, 0xFFFF, 49)
    assert packed[56:105] == name
    assert packed[105:] == data
    page = Path(__file__).parents[3] / "docs/reference/pack-format.md"
    fields = re.findall(r"^\| (\d+) \| (\d+) \| ", page.read_text(), re.MULTILINE)
    header, entry = (
        [(0, 4), (4, 2), (6, 2), (8, 4), (12, 4), (16, 8), (24, 8)],
        [(0, 8), (8, 8), (16, 4), (20, 2), (22, 2)],
    )
    assert [(int(a), int(b)) for a, b in fields] == header + entry


def test_every_truncation_and_extension_is_refused() -> None:
    packed = pack_of(GOOD)
    for length in range(len(packed)):
        with pytest.raises(PackError):
            index_of(packed[:length])
    with pytest.raises(PackError):
        index_of(packed + b"\0")


def test_every_flipped_bit_of_header_and_index_is_refused() -> None:
    packed = pack_of(GOOD)
    stop = HEADER.size + 4 * (24 + 49)
    for bit in range(8 * stop):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackError):
            index_of(bytes(damaged))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    for start in (b"", b"KVP\x01", b"KVP\x01\x01\0\0\0"):
        with pytest.raises(PackError):
            index_of(start + data)


@pytest.mark.parametrize(
    ("records", "index_bytes"), [(0, 0), (1 << 32 - 1, 1 << 31), (1, 1 << 31), (70_000, 70_000 * 60), (4, 24)]
)
def test_absurd_counts_are_refused_before_anything_is_allocated(records: int, index_bytes: int) -> None:
    header = HEADER.pack(b"KVP\x01", 1, 0, records & 0xFFFFFFFF, index_bytes, 400, 0)
    with pytest.raises(PackError):
        parse_header(header + bytes(368), 400)


def resealed(entries: list[tuple[int, int, int, int, int]], names: bytes, tail: bytes) -> bytes:
    index = b"".join(struct.pack("<QQIHH", *entry) for entry in entries) + names
    length = 32 + len(index) + len(tail)
    sealed = HEADER.pack(b"KVP\x01", 1, 0, len(entries), len(index), length, 0)[:24]
    return sealed + xxh3_64_intdigest(sealed + index).to_bytes(8, "little") + index + tail


@pytest.mark.parametrize(
    "entries",
    [
        [(82, 10, 0, 0, 1), (92, 10, 0, 0, 1)],  # sound: the control
        [(82, 10, 0, 0, 1), (90, 12, 0, 0, 1)],  # overlap
        [(82, 10, 0, 0, 1), (93, 9, 0, 0, 1)],  # gap
        [(82, 10, 0, 0, 1), (92, 11, 0, 0, 1)],  # beyond the end
        [(82, 10, 0, 0, 1), (92, 9, 0, 0, 1)],  # bytes that belong to nothing
        [(82, 10, 11, 0, 1), (92, 10, 0, 0, 1)],  # head longer than the record
        [(82, 10, 0, 0, 0), (92, 10, 0, 0, 2)],  # a name without bytes
        [(82, 10, 0, 0, 2), (92, 10, 0, 0, 1)],  # names beyond the index
        [(82, (1 << 64) - 20, 0, 0, 1), (62, 40, 0, 0, 1)],  # around the end of 64 bits
    ],
)
def test_contradictions_under_a_good_checksum_are_refused(entries: list[tuple[int, int, int, int, int]]) -> None:
    packed = resealed(entries, b"ab", bytes(20))
    if entries[1][:2] == (92, 10) and entries[0][2:] == (0, 0, 1):
        assert index_of(packed) == [(b"a", bytes(10)), (b"b", bytes(10))]
        return
    with pytest.raises(PackError):
        index_of(packed)


def test_an_index_cut_by_a_range_is_refused() -> None:
    packed = pack_of(GOOD)
    with pytest.raises(PackError):
        read_index(MemBody(packed[:100], MemMedium(), "key"), len(packed))
    header = parse_header(packed, None)
    assert [entry.name for entry in parse_index(header, packed[32 : header.records_at])] == NAMES


def test_keys_are_safe_and_tell_core_names_only() -> None:
    names = [NAMES[0], b"\0", b"../../etc/passwd", bytes(255), "ü".encode(), b"a" * 48, b"a" * 50]
    keys = [key_of(name) for name in names]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9/_.=-]{1,512}", key)
        assert ".." not in key
        assert holds_records(key)
    assert [name_of(key) for key in keys] == [NAMES[0], *[None] * 6]
    for foreign in ("epochs/00", "namespaces/00.json", "other/zz/abc", keys[0] + "0", keys[0].upper(), "x" + keys[0]):
        assert not holds_records(foreign)

"""Parts of records, and small parts of large packs."""

from __future__ import annotations

import hashlib

import pytest

from kvstore.backend import PutItem
from kvstore.objects.naming import key_of
from kvstore.types import Call, ReadStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import MemMedium, Stored, call_for, chain, content, items_of, put, read

MIB = 1 << 20
NAMES = chain("ranges", 16)


def big(seed: object, nbytes: int) -> bytes:
    return (hashlib.sha256(repr(seed).encode()).digest() * (nbytes // 32 + 1))[:nbytes]


def parts(backend: object, names: list[bytes], ranges: list[tuple[int, int]], call: Call) -> list[bytes | None]:
    found: dict[int, bytes] = {}

    def receive(i: int, view: memoryview) -> None:
        assert view.readonly
        found[i] = bytes(view)

    statuses = backend.get_ranges(names, ranges, receive, call)  # type: ignore[attr-defined]
    assert [s is ReadStatus.OK for s in statuses] == [i in found for i in range(len(names))]
    return [found.get(i) for i in range(len(names))]


def test_ranges_are_cut_at_the_record(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 16))
    ranges = [(0, 10), (290, 400), (300, 310), (0, 0), (5, 5), (0, 1 << 40), (299, 300)]
    found = parts(opener(medium), NAMES[2:9], ranges, call_for(NAMES))
    assert found == [content(name)[a:b] for name, (a, b) in zip(NAMES[2:9], ranges, strict=True)]
    assert medium.count["read"] == 1  # small parts: the pack is read once


def test_a_large_part_of_a_large_record_moves_alone(opener: Opener, medium: MemMedium) -> None:
    names = chain("layers", 3)
    data = {name: big(name, 8 * MIB) for name in names}
    put(opener(medium, block_bytes=8 * MIB), [PutItem(name, [data[name]]) for name in names])
    backend = opener(medium, block_bytes=8 * MIB)
    for k in range(4):
        medium.moved_bytes = 0
        ranges = [(k * 2 * MIB, (k + 1) * 2 * MIB)] * 3
        found = parts(backend, names, ranges, call_for(names))
        assert found == [data[name][k * 2 * MIB : (k + 1) * 2 * MIB] for name in names]
        assert 6 * MIB <= medium.moved_bytes < 6 * MIB + 1000
    assert medium.count["read"] == 3 * (2 + 3)  # the index is read once


def test_one_block_of_a_large_pack_does_not_move_the_others(opener: Opener, medium: MemMedium) -> None:
    names = chain("sparse", 8)
    put(opener(medium, block_bytes=2 * MIB), items_of(names, 0, 8, 2 * MIB))
    backend = opener(medium, block_bytes=2 * MIB)
    assert read(backend, names[2:4], call_for(names)) == [content(name, 2 * MIB) for name in names[2:4]]
    assert medium.moved_bytes < 4 * MIB + 4096
    assert read(backend, names, call_for(names)) == [content(name, 2 * MIB) for name in names]
    backend.touch_many(names)


@pytest.mark.parametrize("how", ["shorter", "gone", "replaced"])
def test_a_part_of_an_object_that_changed_is_a_miss_or_found(opener: Opener, medium: MemMedium, how: str) -> None:
    names = chain("changed", 8)
    put(opener(medium, block_bytes=2 * MIB), items_of(names, 0, 8, 2 * MIB))
    backend = opener(medium, block_bytes=2 * MIB)
    read(backend, names[2:3], call_for(names))
    key = key_of(names[7])
    if how == "gone":
        del medium.objects[key]
    elif how == "shorter":
        medium.objects[key] = Stored(medium.objects[key].data[: 5 * MIB], 1.0, 8)
    else:
        medium.objects[key] = Stored(b"x" * (17 * MIB), 1.0, 8)
    found = read(backend, names[2:3], call_for(names))
    if how == "replaced":  # other bytes reach the core, which finds them wrong and says so
        backend.discard(names[2], 0)
        found = read(backend, names[2:3], call_for(names))
    assert found in ([None], [content(names[2], 2 * MIB)])
    for name in names:
        backend.discard(name, 0)


def test_an_absent_record_has_no_parts(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium, block_bytes=8 * MIB)
    assert parts(backend, NAMES[:2], [(0, 4 * MIB)] * 2, call_for(NAMES)) == [None, None]

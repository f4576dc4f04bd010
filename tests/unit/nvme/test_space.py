"""Capacity: never passed, regions evicted in order of use, changed between runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvstore_nvme.geometry import choose, count_regions, index_budget

from kvstore.backend import PutHint, PutItem
from kvstore.errors import ConfigError
from kvstore.types import PutStatus
from tests.unit.nvme.stores import MIB, Opener, bytes_of, call, files_bytes, item_of, name_of, put, put_each, read


@pytest.mark.parametrize("mib", [4, 8, 16, 32, 64, 1024, 1 << 16])
@pytest.mark.parametrize("block_bytes", [0, 4096, 65_536, 1 << 20, 2 << 20])
def test_a_geometry_never_promises_more_than_the_capacity(mib: int, block_bytes: int) -> None:
    capacity = mib * MIB
    if mib == 4 and block_bytes == 2 << 20:
        with pytest.raises(ConfigError, match="give it at least"):
            choose(capacity, block_bytes, None)
        return
    geometry = choose(capacity, block_bytes, None)
    index = index_budget(capacity, block_bytes)
    regions = count_regions(geometry, capacity, index)
    assert regions >= 2
    assert regions * geometry.region_bytes + index <= capacity
    assert geometry.region_bytes >= block_bytes + 4096
    assert regions * geometry.region_bytes > (0.6 if mib > 4 else 0.4) * capacity


def test_files_never_take_more_than_the_capacity(opener: Opener, tmp_path: Path) -> None:
    capacity = 16 * MIB
    backend = opener(capacity_bytes=capacity, block_bytes=256 << 10)
    stop, seen = threading.Event(), [0]

    def watch() -> None:
        while not stop.is_set():
            seen.append(files_bytes(tmp_path / "store"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    rng = random.Random(3)
    statuses = [put(backend, item_of(i, rng.randrange(1000, 256 << 10)))[0] for i in range(300)]
    stop.set()
    watcher.join()
    assert set(statuses) == {PutStatus.STORED}
    assert 0.8 * capacity < max(seen) <= capacity
    usage = backend.usage()
    assert usage.payload_bytes <= capacity
    assert usage.file_bytes <= capacity
    assert usage.evicted + usage.records == 300
    newest = [name_of(i) for i in range(270, 300)]
    assert None not in read(backend, newest)


def test_an_index_of_tiny_records_stays_within_its_share(opener: Opener, tmp_path: Path) -> None:
    backend = opener(capacity_bytes=8 * MIB)  # the block size is not known: an index for records of 32 KiB
    for start in range(0, 8000, 200):
        assert set(put(backend, *(item_of(i, 300) for i in range(start, start + 200)))) == {PutStatus.STORED}
    assert files_bytes(tmp_path / "store") <= 8 * MIB
    assert backend.usage().records > 400
    assert read(backend, [name_of(i) for i in range(7900, 8000)]) == [bytes_of(i, 300) for i in range(7900, 8000)]


def test_evicted_names_are_reported_once_and_gone(opener: Opener) -> None:
    gone: list[bytes] = []
    backend = opener(capacity_bytes=16 * MIB, block_bytes=MIB, removed=gone.extend)
    put_each(backend, range(40), MIB)
    assert len(gone) == len(set(gone)) == backend.usage().evicted > 20
    found = read(backend, [name_of(i) for i in range(40)])
    assert {name_of(i) for i, data in enumerate(found) if data is None} == set(gone)
    assert [data for data in found if data] == [bytes_of(i, MIB) for i in range(40) if name_of(i) not in set(gone)]


def test_used_records_outlive_unused_ones(opener: Opener) -> None:
    backend = opener(capacity_bytes=16 * MIB, block_bytes=128 << 10)
    hot = [name_of(i) for i in range(8)]
    for i in range(300):
        put(backend, item_of(i, 128 << 10))
        if i >= 8 and i % 10 == 0:
            backend.touch_many(hot)
            backend.maintain()
    assert None not in read(backend, hot)
    assert read(backend, hot) == [bytes_of(i, 128 << 10) for i in range(8)]
    assert None in read(backend, [name_of(i) for i in range(50, 100)])


def test_what_was_put_last_survives_the_next_eviction(opener: Opener) -> None:
    """Also when everything older was read once, and the region that was sealed a moment ago was not yet."""
    backend = opener(capacity_bytes=16 * MIB, block_bytes=64 << 10)
    for i in range(0, 600, 2):  # more than two laps, two blocks a put
        names = [name_of(i), name_of(i + 1)]
        for name in (i, i + 1):
            put(backend, item_of(name, 64 << 10))
        assert read(backend, names) == [bytes_of(i, 64 << 10), bytes_of(i + 1, 64 << 10)]
        backend.touch_many(names)
        backend.maintain()  # uses reach the index


def test_a_put_of_several_regions_is_whole_when_it_ends(opener: Opener) -> None:
    """Also when everything older has been used, and nothing of this put yet."""
    backend = opener(capacity_bytes=16 * MIB, block_bytes=64 << 10)
    for batch in range(14):
        ids = range(48 * batch, 48 * (batch + 1))
        for i in ids:
            put(backend, item_of(i, 64 << 10))
        assert None not in read(backend, [name_of(i) for i in ids]), batch
        backend.touch_many([name_of(i) for i in ids])
        backend.maintain()  # uses reach the index


def test_a_put_of_a_stored_name_counts_as_a_use(opener: Opener) -> None:
    backend = opener(capacity_bytes=16 * MIB, block_bytes=128 << 10)
    for i in range(300):
        put(backend, item_of(i, 128 << 10))
        if i % 10 == 0:
            put(backend, item_of(0, 128 << 10))
    assert read(backend, [name_of(0)]) == [bytes_of(0, 128 << 10)]


def test_a_smaller_capacity_evicts_and_gives_the_space_back(
    opener: Opener, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    backend = opener(capacity_bytes=64 * MIB, block_bytes=MIB)
    put_each(backend, range(50), MIB)
    backend.close()
    smaller = opener(capacity_bytes=24 * MIB, block_bytes=MIB)
    assert files_bytes(tmp_path / "store") <= 24 * MIB
    assert smaller.usage().capacity_bytes == 24 * MIB
    assert put(smaller, item_of("new", MIB)) == [PutStatus.STORED]
    there = [i for i, data in enumerate(read(smaller, [name_of(i) for i in range(50)])) if data == bytes_of(i, MIB)]
    assert 8 <= len(there) <= 24
    assert len([w for w in warnings() if "capacity changed" in w]) == 1
    smaller.close()
    larger = opener(capacity_bytes=96 * MIB, block_bytes=MIB)
    put_each(larger, range(100, 160), MIB)
    assert files_bytes(tmp_path / "store") > 64 * MIB
    assert None not in read(larger, [*map(name_of, there), name_of("new")])


def test_a_capacity_below_two_regions_starts_anew(opener: Opener, tmp_path: Path) -> None:
    backend = opener(capacity_bytes=1024 * MIB)
    put(backend, item_of(1))
    backend.close()
    tiny = opener(capacity_bytes=8 * MIB)
    assert read(tiny, [name_of(1)]) == [None]
    assert put(tiny, item_of(2)) == [PutStatus.STORED]
    assert files_bytes(tmp_path / "store") <= 8 * MIB


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"capacity_bytes": MIB}, "'capacity': 1048576"),
        ({"capacity_bytes": 4 * MIB, "block_bytes": 4 * MIB}, "give it at least"),
        ({"options": {"region_bytes": 1000}}, "'region_bytes'"),
        ({"options": {"region_bytes": 2 << 30}}, "'region_bytes'"),
        ({"options": {"region_bytes": 1 << 20}, "block_bytes": 1 << 20}, "one block"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    opener: Opener, tmp_path: Path, context: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opener(**context)
    assert not list((tmp_path / "store").glob("seg-*"))


def test_blocks_larger_than_the_regions_of_a_store_are_refused_at_open(opener: Opener) -> None:
    opener(block_bytes=65_536, options={"region_bytes": 1 << 20}).close()
    with pytest.raises(ConfigError, match="does not fit"):
        opener(block_bytes=2 << 20)


def test_orphans_are_counted(opener: Opener) -> None:
    backend = opener()

    def child(i: int, parent: int) -> PutItem:
        item = item_of(i)
        return PutItem(item.name, item.buffers, PutHint(name_of(parent), i))

    put(backend, item_of(0), child(1, 0), child(2, 1), child(3, 2))
    backend.delete_many([name_of(1)], call())
    backend.maintain()
    assert backend.usage().orphaned_bytes == 3 * 4096
    assert backend.usage().payload_bytes == 9 * 4096

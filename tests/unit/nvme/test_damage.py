"""A lost or stale index, damaged files, power cuts: a miss at worst, and the store goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kvstore_lmdb import statefile
from kvstore_nvme.geometry import ANCHOR_NAME
from kvstore_nvme.slot import PAGE_BYTES, Slot

from kvstore.backend import PutItem
from kvstore.errors import BackendPermissionError, BackendUnavailableError
from kvstore.types import PutStatus, ReadStatus
from tests.unit.nvme.stores import (
    MIB,
    NvmeBackend,
    Opener,
    bytes_of,
    call,
    files_bytes,
    item_of,
    name_of,
    put,
    put_each,
    read,
    read_into,
    slots_on_disk,
)


def lose_index(store: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        (store / "index" / name).unlink()


def test_a_lost_index_is_made_anew_from_the_records(
    opener: Opener, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    backend = opener(capacity_bytes=16 * MIB, block_bytes=65_536)
    sizes = {i: i * 1999 % 65_536 for i in range(300)}
    put(backend, *(item_of(i, n) for i, n in sizes.items()))
    backend.delete_many([name_of(299), name_of(298)], call())
    epoch = backend.epoch(b"n" * 16)
    before = {(i.name, i.nbytes, i.head_bytes, i.codec_id) for i in backend.scan()}
    usage = backend.usage()
    backend.close()
    lose_index(tmp_path / "store")
    again = opener(capacity_bytes=16 * MIB, block_bytes=65_536)
    assert {(i.name, i.nbytes, i.head_bytes, i.codec_id) for i in again.scan()} == before
    expected = [bytes_of(i, sizes[i]) for i in range(298)]
    found = read(again, [name_of(i) for i in range(300)])
    assert found[298:] == [None, None]  # deleted is deleted
    assert [f for f in found[:298] if f is not None] == [
        e for e, f in zip(expected, found[:298], strict=True) if f is not None
    ]
    assert again.epoch(b"n" * 16) == epoch
    assert (again.usage().records, again.usage().payload_bytes) == (usage.records, usage.payload_bytes)
    assert put(again, item_of("new")) == [PutStatus.STORED]
    assert len([w for w in warnings() if "making the index anew" in w]) == 1


def test_records_of_a_regions_past_life_do_not_come_back(opener: Opener, tmp_path: Path) -> None:
    backend = opener(capacity_bytes=8 * MIB, block_bytes=65_536)
    put_each(backend, range(100), 60_000)
    put_each(backend, range(100, 230), 30_000)  # over regions that still hold older slots further on
    there = {info.name for info in backend.scan()}
    backend.close()
    lose_index(tmp_path / "store")
    again = opener(capacity_bytes=8 * MIB, block_bytes=65_536)
    assert {info.name for info in again.scan()} == there
    for i, data in enumerate(read(again, [name_of(i) for i in range(230)])):
        assert data in {None, bytes_of(i, 60_000 if i < 100 else 30_000)}


def test_a_hole_in_a_region_hides_nothing_behind_it(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, *(item_of(i, 30_000) for i in range(20)))
    backend.close()
    path, at, _ = next(s for s in slots_on_disk(tmp_path / "store") if s[2].name == name_of(7))
    with path.open("r+b") as f:
        f.seek(at)
        f.write(b"torn" * 1024)
    lose_index(tmp_path / "store")
    again = opener()
    assert read(again, [name_of(i) for i in range(20)]) == [bytes_of(i, 30_000) if i != 7 else None for i in range(20)]


def damage(path: Path, how: str) -> None:
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "zeroed":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "noise":
        path.write_bytes(bytes_of("noise", path.stat().st_size))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["cut", "zeroed", "noise", "emptied"])
def test_a_damaged_index_costs_nothing(opener: Opener, tmp_path: Path, how: str) -> None:
    backend = opener()
    put(backend, *(item_of(i) for i in range(200)))
    backend.close()
    damage(tmp_path / "store" / "index" / "data.mdb", how)
    again = opener()
    assert read(again, [name_of(i) for i in range(200)]) == [bytes_of(i, 5000) for i in range(200)]


@pytest.mark.parametrize("how", ["cut", "zeroed", "noise", "emptied"])
def test_a_damaged_description_of_the_store_starts_cold(
    opener: Opener, tmp_path: Path, how: str, warnings: Callable[[], list[str]]
) -> None:
    backend = opener()
    put(backend, item_of(1))
    backend.close()
    anchor = tmp_path / "store" / ANCHOR_NAME
    damage(anchor, "emptied" if how == "cut" else how)
    if how == "cut":
        anchor.write_bytes(b'{"format": 1, "region_bytes": 17, "segment_regions": 4}')
    again = opener()
    assert read(again, [name_of(1)]) == [None]
    assert put(again, item_of(2)) == [PutStatus.STORED]
    assert len([w for w in warnings() if "was damaged" in w]) == 1


@pytest.mark.parametrize("how", ["cut", "zeroed", "noise", "emptied", "removed"])
def test_a_damaged_segment_is_a_miss_and_its_space_comes_back(opener: Opener, tmp_path: Path, how: str) -> None:
    backend = opener(capacity_bytes=16 * MIB, block_bytes=256 << 10)
    put_each(backend, range(50), 250_000)
    backend.close()
    segment = tmp_path / "store" / "seg-0000"
    if how == "removed":
        segment.unlink()
    else:
        damage(segment, how)
    again = opener(capacity_bytes=16 * MIB, block_bytes=256 << 10)
    expected = [bytes_of(i, 250_000) for i in range(50)]
    for how_read in (read, read_into):
        for found, data in zip(how_read(again, [name_of(i) for i in range(50)]), expected, strict=True):
            assert found in {None, data}
    again.maintain()
    listed = {info.name for info in again.scan()}
    there = {name_of(i) for i, data in enumerate(read(again, [name_of(i) for i in range(50)])) if data}
    assert listed == there  # what is not there is not offered
    assert set(put_each(again, range(100, 200), 250_000)) == {PutStatus.STORED}
    assert files_bytes(tmp_path / "store") <= 16 * MIB


def test_a_header_that_is_not_the_entrys_is_a_miss_and_the_entry_goes(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, *(item_of(i, 30_000) for i in range(4)))
    slots = {slot.name: (path, at, slot) for path, at, slot in slots_on_disk(tmp_path / "store")}
    path, at, slot = slots[name_of(1)]
    changes = [replace(slot, name=name_of(2)), replace(slot, sequence=slot.sequence - 1), replace(slot, nbytes=29_999)]
    for change in changes:
        page = memoryview(bytearray(PAGE_BYTES))
        change.pack_into(page)
        fd = os.open(path, os.O_RDWR)
        original = os.pread(fd, PAGE_BYTES - slot.front_bytes, at)
        os.pwrite(fd, page[: PAGE_BYTES - slot.front_bytes], at)
        os.close(fd)
        assert read(backend, [name_of(i) for i in range(4)]) == [
            bytes_of(i, 30_000) if i != 1 else None for i in range(4)
        ]
        assert name_of(1) not in {info.name for info in backend.scan()}
        assert put(backend, item_of(1, 30_000)) == [PutStatus.STORED]
        path, at, slot = next(s for s in slots_on_disk(tmp_path / "store") if s[2].name == name_of(1) and s[1] > at)
        assert original


@pytest.mark.parametrize("tail", ["zeroed", "dropped"])
def test_a_power_cut_costs_misses_only(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str, warnings: Callable[[], list[str]]
) -> None:
    """An unclean end, another boot, an index that may be anything, and a tail that never reached the disk."""
    store = tmp_path / "store"
    backend = opener()
    put(backend, *(item_of(i, 30_000) for i in range(40)))
    kept = tmp_path / "kept"
    shutil.copytree(store, kept)  # the state file says "open"
    backend.close()
    shutil.rmtree(store)
    shutil.copytree(kept, store)
    slots = {slot.name: (path, at, slot) for path, at, slot in slots_on_disk(store)}
    for i in range(30, 40):
        path, at, slot = slots[name_of(i)]
        with path.open("r+b") as f:
            f.seek(at)
            f.write(bytes(slot.pages * PAGE_BYTES) if tail == "zeroed" else bytes(PAGE_BYTES))
    (store / "index" / "data.mdb").write_bytes(bytes_of("half written", 200_000))
    monkeypatch.setattr(statefile, "boot_id", lambda: "another-boot")
    again = opener()
    assert read(again, [name_of(i) for i in range(40)]) == [bytes_of(i, 30_000) if i < 30 else None for i in range(40)]
    assert put(again, item_of("new")) == [PutStatus.STORED]
    assert any("went down" in w for w in warnings())


def test_an_index_older_than_the_segments_is_a_miss_at_worst(opener: Opener, tmp_path: Path) -> None:
    store = tmp_path / "store"
    backend = opener(capacity_bytes=8 * MIB, block_bytes=65_536)
    put_each(backend, range(100), 60_000)
    backend.close()
    shutil.copytree(store / "index", tmp_path / "old-index")
    backend = opener(capacity_bytes=8 * MIB, block_bytes=65_536)
    put_each(backend, range(100, 300), 45_000)
    backend.close()
    shutil.rmtree(store / "index")
    shutil.copytree(tmp_path / "old-index", store / "index")
    again = opener(capacity_bytes=8 * MIB, block_bytes=65_536)
    found = read(again, [name_of(i) for i in range(100)])
    heads = [data[:PAGE_BYTES] if data else None for data in found]
    assert [i for i, head in enumerate(heads) if head not in {None, bytes_of(i, 60_000)[:PAGE_BYTES]}] == []
    assert None in heads
    assert set(put_each(again, range(300, 400), 60_000)) == {PutStatus.STORED}


def test_a_segment_file_without_its_description_is_not_touched(opener: Opener, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    (store / "seg-0000").write_bytes(b"of another program")
    with pytest.raises(BackendUnavailableError, match="name another directory"):
        opener()
    assert (store / "seg-0000").read_bytes() == b"of another program"


def test_foreign_files_stay_as_they_are(opener: Opener, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "folder").mkdir(parents=True, mode=0o700)
    store.chmod(0o700)
    for name in ("seg-notes.txt", "folder/x", "data.mdb"):
        (store / name).write_bytes(b"foreign")
    backend = opener(capacity_bytes=8 * MIB)
    put_each(backend, range(60), 200_000)
    backend.close()
    for name in ("seg-notes.txt", "folder/x", "data.mdb"):
        assert (store / name).read_bytes() == b"foreign"


@pytest.mark.parametrize("name", ["seg-0000", "kvstore.nvme", "kvstore.regions", "index", "index/data.mdb"])
def test_links_are_never_followed(opener: Opener, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    store = tmp_path / "store"
    opener().close()
    planted = store / name
    if planted.is_dir():
        planted.rename(tmp_path / "moved")
        planted.symlink_to(tmp_path / "moved")
    else:
        planted.unlink(missing_ok=True)
        planted.symlink_to(victim)
    with pytest.raises(BackendPermissionError):
        opener()
    assert victim.read_bytes() == b"untouched"


def test_a_link_planted_while_open_is_not_written_through(opener: Opener, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    backend = opener()
    (tmp_path / "store" / "seg-0000").symlink_to(victim)
    assert put(backend, item_of(1)) == [PutStatus.DENIED]
    assert victim.read_bytes() == b"untouched"
    (tmp_path / "store" / "seg-0000").unlink()
    assert put(backend, item_of(1)) == [PutStatus.STORED]


def test_files_are_private_whatever_the_umask(opener: Opener, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        backend = opener(namespace=b"n" * 16)
        put(backend, item_of(1))
        backend.epoch(b"n" * 16)
    finally:
        os.umask(old)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_newer_format_is_refused(opener: Opener, tmp_path: Path) -> None:
    opener().close()
    anchor = tmp_path / "store" / ANCHOR_NAME
    anchor.write_text(anchor.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(BackendUnavailableError, match="upgrade kvstore"):
        opener()


def test_a_page_that_is_no_slot_is_told_from_one() -> None:
    slot = Slot.of(PutItem(name_of(1), [bytes(5000)]))
    page = memoryview(bytearray(PAGE_BYTES))
    slot.pack_into(page)
    assert Slot.parse(page) == slot
    for at in range(64 + 49):
        page[at] ^= 1
        assert Slot.parse(page) is None
        page[at] ^= 1
    assert Slot.parse(page[:100]) is None


def test_unreadable_bytes_are_offered_once_more_and_then_forgotten(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: NvmeBackend = opener()
    put(backend, item_of(1))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        for _ in range(2):
            assert backend.get_many([name_of(1)], lambda *_: None, call()) == [ReadStatus.UNAVAILABLE]
    assert read(backend, [name_of(1)]) == [None]
    assert put(backend, item_of(1)) == [PutStatus.STORED]

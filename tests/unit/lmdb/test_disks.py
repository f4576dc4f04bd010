"""Full, read-only and vanishing disks under a store."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import BackendFullError
from kvstore.types import PutStatus
from tests.unit.lmdb.stores import MIB, Opener, bytes_of, item_of, name_of, put, read


def _mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point))
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"cannot mount a tmpfs: {e}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_read_only_mount_serves_refuses_and_recovers(
    opener: Opener, small_disk: Path, warnings: Callable[[], list[str]]
) -> None:
    running = opener(small_disk / "store", capacity_bytes=4 * MIB)
    put(running, item_of(1))
    running.close()
    _mount("-o", "remount,ro", str(small_disk))
    backend = opener(small_disk / "store", capacity_bytes=4 * MIB)
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]
    assert put(backend, item_of(2)) == [PutStatus.READ_ONLY]
    assert backend.describe()["access"] == "read-only"
    assert len(warnings()) == 1
    _mount("-o", "remount,rw", str(small_disk))
    backend.maintain()
    assert put(backend, item_of(2)) == [PutStatus.STORED]


def test_a_disk_that_fills_up_refuses_then_heals(opener: Opener, small_disk: Path) -> None:
    foreign = small_disk / "foreign"
    foreign.write_bytes(bytes(8 * MIB))
    backend = opener(small_disk / "store", capacity_bytes=64 * MIB)
    statuses = [put(backend, item_of(i, MIB))[0] for i in range(40)]
    assert set(statuses) <= {PutStatus.STORED, PutStatus.FULL}
    assert statuses[-10:].count(PutStatus.STORED) >= 7
    assert backend.usage().evicted > 0
    for i, data in enumerate(read(backend, [name_of(i) for i in range(40)])):
        assert data in {None, bytes_of(i, MIB)}
    foreign.unlink()
    assert [put(backend, item_of(100 + i, MIB))[0] for i in range(10)].count(PutStatus.STORED) >= 9
    assert backend.usage().file_bytes > 8 * MIB


def test_no_room_for_a_new_store_is_told(opener: Opener, small_disk: Path) -> None:
    full = small_disk / "foreign"
    with full.open("wb", buffering=0) as f:
        for step in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while f.write(bytes(step)):
                    pass
    with pytest.raises(BackendFullError, match="free disk space"):
        opener(small_disk / "store")
    full.unlink()
    assert put(opener(small_disk / "store"), item_of(1)) == [PutStatus.STORED]


@pytest.mark.parametrize("how", ["renamed", "removed", "wiped"])
def test_a_directory_replaced_underneath_is_noticed(
    opener: Opener, tmp_path: Path, warnings: Callable[[], list[str]], how: str
) -> None:
    store = tmp_path / "store"
    backend, beside = opener(), opener()
    put(backend, item_of(1))
    if how == "renamed":
        store.rename(tmp_path / "old")
        opener(tmp_path / "other").close()
        (tmp_path / "other").rename(store)
    elif how == "removed":
        shutil.rmtree(store)
    else:
        for path in store.iterdir():
            path.unlink()
    statuses = []
    for _ in range(3):
        for one in (backend, beside):
            one.maintain()
            assert one._session is not None
            one._session._next_open = 0.0  # not a second later, but now
        statuses = [put(backend, item_of(2))[0], put(beside, item_of(3))[0]]
    assert set(statuses) <= {PutStatus.STORED, PutStatus.EXISTS}
    assert read(backend, [name_of(1), name_of(2), name_of(3)]) == [None, bytes_of(2, 5000), bytes_of(3, 5000)]
    assert (store / "data.mdb").stat().st_size > 0
    assert len([w for w in warnings() if "was replaced" in w]) == 1

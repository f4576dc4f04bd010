"""The tree on disks that are full, read-only, stacked, without links, or failing."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.backend import PutItem
from kvstore.errors import BackendFullError, BackendUnavailableError
from kvstore.types import Presence, PutStatus
from tests.unit.objects.mem import call_for, chain, content, items_of, put, read
from tests.unit.objects.trees import BLOCK_BYTES, Opener, files_in, openings, taken_bytes

NAMES = chain("tree", 64)
EXPECTED = [content(name, BLOCK_BYTES) for name in NAMES]
MIB = 1 << 20


def mount(*args: str) -> None:
    try:
        subprocess.run(["mount", *args], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"cannot mount: {e}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point))
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture
def overlay(tmp_path: Path, disk: Path) -> Iterator[Path]:
    """A container's root file system in small."""
    point, upper, work, lower = tmp_path / "overlay", disk / "upper", disk / "work", tmp_path / "lower"
    for path in (point, upper, work, lower):
        path.mkdir()
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", str(point))
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    with openings(tmp_path / "store") as opener:
        yield opener


def failing(number: int, *, after: int = 0) -> Callable[..., object]:
    """A system call that fails from some call on."""
    calls = iter(range(1_000_000))

    def call(*args: object, **kwargs: object) -> object:
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return None

    return call


def test_an_overlay_holds_a_tree(opener: Opener, overlay: Path) -> None:
    a, b = opener(overlay / "store", capacity_bytes=6 * MIB), opener(overlay / "store", capacity_bytes=6 * MIB)
    for k in range(30):
        assert set(put((a, b)[k % 2], items_of(chain(k, 64), 0, 64, BLOCK_BYTES))) <= {PutStatus.STORED}
    newest = chain(29, 64)
    assert read(a, newest, call_for(newest)) == [content(name, BLOCK_BYTES) for name in newest]
    assert a.usage().payload_bytes <= 6 * MIB
    assert b.delete_many(newest, call_for(newest)) == 64
    assert a.exists_many(newest, call_for(newest)) == [Presence.ABSENT] * 64
    assert not [path for path in files_in(overlay / "store") if path.name.startswith(".")]


def test_a_disk_that_fills_up_heals_by_evicting(opener: Opener, disk: Path) -> None:
    foreign = disk / "foreign"
    foreign.write_bytes(bytes(8 * MIB))
    backend = opener(disk / "store", block_bytes=MIB)
    statuses = [put(backend, items_of(chain(k, 1), 0, 1, MIB))[0] for k in range(30)]
    assert statuses == [PutStatus.STORED] * 30
    assert backend.usage().evicted > 0
    found = [read(backend, chain(k, 1))[0] for k in range(30)]
    assert all(data in (None, content(chain(k, 1)[0], MIB)) for k, data in enumerate(found))
    assert found[-1] is not None
    foreign.unlink()
    for k in range(30, 44):
        put(backend, items_of(chain(k, 1), 0, 1, MIB))
    assert backend.usage().payload_bytes > 8 * MIB


def test_a_disk_without_inodes_heals_by_evicting(opener: Opener, tmp_path: Path) -> None:
    point = tmp_path / "inodes"
    point.mkdir()
    mount("-t", "tmpfs", "-o", "size=64m,nr_inodes=60", "tmpfs", str(point))
    try:
        backend = opener(point / "store", pack=1)
        names = chain("inodes", 60)
        statuses = [put(backend, items_of(names, k, k + 1, BLOCK_BYTES))[0] for k in range(60)]
        assert set(statuses) <= {PutStatus.STORED, PutStatus.FULL}
        assert statuses[:15] == [PutStatus.STORED] * 15
        assert PutStatus.STORED in statuses[-20:]
        others = [
            PutItem(chain(k, 1)[0], [content(NAMES[0], BLOCK_BYTES)]) for k in range(60)
        ]  # in directories all over
        assert [put(backend, [item])[0] for item in others][-20:] == [PutStatus.STORED] * 20
        assert backend.usage().records >= 5
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_read_only_mount_serves_refuses_and_recovers(opener: Opener, disk: Path) -> None:
    running = opener(disk / "store")
    put(running, items_of(NAMES, 0, 32, BLOCK_BYTES))
    epoch = running.epoch(b"n" * 16)
    mount("-o", "remount,ro", str(disk))
    try:
        for backend in (running, opener(disk / "store")):
            assert read(backend, NAMES[:32], call_for(NAMES[:32])) == EXPECTED[:32]
            assert put(backend, items_of(NAMES, 32, 34, BLOCK_BYTES)) == [PutStatus.READ_ONLY] * 2
            assert backend.epoch(b"n" * 16) == epoch
            backend.touch_many(NAMES[:32])
            backend.maintain()
    finally:
        mount("-o", "remount,rw", str(disk))
    assert set(put(running, items_of(NAMES, 32, 34, BLOCK_BYTES))) == {PutStatus.STORED}


def test_no_room_for_a_new_store_is_told(opener: Opener, disk: Path) -> None:
    with (disk / "foreign").open("wb", buffering=0) as f:
        for step in (MIB, 4096):
            try:
                while f.write(bytes(step)):
                    pass
            except OSError:
                continue
    with pytest.raises(BackendFullError, match="free disk space"):
        opener(disk / "store")
    (disk / "foreign").unlink()
    assert set(put(opener(disk / "store"), items_of(NAMES, 0, 1, BLOCK_BYTES))) == {PutStatus.STORED}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_links_renames(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    backend = opener()
    assert set(put(backend, items_of(NAMES, 0, 64, BLOCK_BYTES))) == {PutStatus.STORED}
    assert set(put(opener(), items_of(NAMES, 0, 64, BLOCK_BYTES))) == {PutStatus.EXISTS}
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED
    assert not [path for path in files_in(tmp_path / "store") if path.name.startswith(".")]


def test_a_link_whose_answer_was_lost_counts_as_made(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS a repeated request finds the link that the first one made."""
    link = os.link

    def twice(a: str, b: str) -> None:
        link(a, b)
        link(a, b)

    backend = opener()
    monkeypatch.setattr(os, "link", twice)
    assert set(put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))) == {PutStatus.STORED}
    assert len(files_in(tmp_path / "store")) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EXDEV, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("function", ["writev", "link", "open"])
def test_a_failed_write_stays_invisible_and_leaves_nothing(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    backend = opener()
    put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))
    with monkeypatch.context() as patched:
        patched.setattr(os, function, failing(number))
        assert set(put(backend, items_of(NAMES, 16, 32, BLOCK_BYTES))) == {PutStatus.UNAVAILABLE}
    assert read(backend, NAMES[:32], call_for(NAMES[:32])) == [*EXPECTED[:16], *[None] * 16]
    assert len(files_in(tmp_path / "store")) == 1
    assert backend.usage().records == 16
    assert set(put(backend, items_of(NAMES, 16, 32, BLOCK_BYTES))) == {PutStatus.STORED}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_is_a_full_disk(opener: Opener, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    backend = opener()
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", failing(number))
        assert set(put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))) == {PutStatus.FULL}
    assert set(put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))) == {PutStatus.STORED}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_failed_read_is_told_and_keeps_the_file(opener: Opener, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    put(opener(), items_of(NAMES, 0, 16, BLOCK_BYTES))
    backend = opener()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(number))
        assert read(backend, NAMES[:16], call_for(NAMES[:16])) == [None] * 16
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(number))
        assert set(backend.exists_many(NAMES[:16], call_for(NAMES[:16]))) == {Presence.UNKNOWN}
    assert read(backend, NAMES[:16], call_for(NAMES[:16])) == EXPECTED[:16]


def test_short_writes_go_on(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(
        os, "writev", lambda fd, views: os.write(fd, bytes(views[0][:777])) if views else writev(fd, views)
    )
    backend = opener()
    assert set(put(backend, items_of(NAMES, 0, 20, BLOCK_BYTES))) == {PutStatus.STORED}
    monkeypatch.undo()
    assert read(backend, NAMES[:20], call_for(NAMES[:20])) == EXPECTED[:20]


@pytest.mark.parametrize(("durability", "syncs"), [("cache", 0), ("durable", 2)])
def test_durability_decides_about_fsync(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, durability: str, syncs: int
) -> None:
    backend = opener(durability=durability)
    put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))
    put(backend, items_of(NAMES, 16, 32, BLOCK_BYTES))
    synced: list[int] = []
    fsync = os.fsync

    def counted(fd: int) -> None:
        synced.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    backend.delete_many(NAMES[:16], call_for(NAMES))
    put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))
    assert len(synced) == syncs  # the file, and the directory it was published in
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    status = set(put(backend, items_of(NAMES, 32, 48, BLOCK_BYTES)))
    assert status == ({PutStatus.UNAVAILABLE} if syncs else {PutStatus.STORED})
    assert read(backend, NAMES[32:48], call_for(NAMES)) == ([None] * 16 if syncs else EXPECTED[32:48])


@pytest.mark.parametrize("how", ["wiped", "removed"])
def test_a_directory_emptied_underneath_is_filled_again(opener: Opener, tmp_path: Path, how: str) -> None:
    store = tmp_path / "store"
    backend = opener()
    put(backend, items_of(NAMES, 0, 64, BLOCK_BYTES))
    subprocess.run(["rm", "-r", *([store] if how == "removed" else list(store.iterdir()))], check=True)
    backend.maintain()
    assert read(backend, NAMES, call_for(NAMES)) == [None] * 64
    assert set(put(backend, items_of(NAMES, 0, 64, BLOCK_BYTES))) == {PutStatus.STORED}
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED
    assert backend.usage().records == 64


def test_a_mount_that_went_away_is_unavailable(opener: Opener, tmp_path: Path) -> None:
    store = tmp_path / "gone/store"
    backend = opener(store)
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    started = time.monotonic()
    assert set(put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))) == {PutStatus.UNAVAILABLE}
    assert time.monotonic() - started < 2.0
    with pytest.raises(BackendUnavailableError):
        backend.epoch(b"new namespace 16")
    assert taken_bytes(tmp_path / "elsewhere") > 0

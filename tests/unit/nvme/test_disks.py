"""Full, read-only and vanishing disks under a store; file systems without direct I/O; the doctor."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kvstore_nvme.diagnosis import diagnose

from kvstore.backend import BackendContext
from kvstore.errors import BackendFullError, BackendPermissionError, BackendUnavailableError, ConfigError
from kvstore.types import PutStatus, ReadStatus
from tests.unit.nvme.stores import MIB, NvmeOptions, Opener, bytes_of, call, item_of, name_of, put, put_each, read


def _remount(point: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(point)], check=True, capture_output=True)


def test_a_read_only_mount_serves_refuses_and_recovers(
    opener: Opener, small_disk: Path, warnings: Callable[[], list[str]]
) -> None:
    running = opener(small_disk / "store", capacity_bytes=8 * MIB)
    put(running, item_of(1))
    running.close()
    _remount(small_disk, "ro")
    backend = opener(small_disk / "store", capacity_bytes=8 * MIB)
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]
    assert put(backend, item_of(2)) == [PutStatus.READ_ONLY]
    with pytest.raises(BackendPermissionError, match="read-only"):
        backend.delete_many([name_of(1)], call())
    assert backend.describe()["access"] == "read-only"
    assert len(warnings()) == 1
    _remount(small_disk, "rw")
    backend.maintain()
    assert put(backend, item_of(2)) == [PutStatus.STORED]


def test_a_mount_that_turns_read_only_goes_on_serving(opener: Opener, small_disk: Path) -> None:
    backend = opener(small_disk / "store", capacity_bytes=8 * MIB)
    put(backend, item_of(1))
    # The kernel refuses while files are open for writing; what it would then say is said here.
    session = backend._session
    assert session is not None
    session._refused_writes = True
    session._mounted_read_only = lambda: True  # type: ignore[method-assign]
    assert put(backend, item_of(2)) == [PutStatus.READ_ONLY]
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]
    session._mounted_read_only = lambda: False  # type: ignore[method-assign]
    assert put(backend, item_of(2)) == [PutStatus.STORED]


def test_read_only_changes_nothing(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    epoch = backend.epoch(b"n" * 16)
    backend.close()
    before = {p: p.read_bytes() for p in (tmp_path / "store").rglob("*") if p.is_file() and p.name != "lock.mdb"}
    reader = opener(read_only=True)
    assert read(reader, [name_of(1), name_of(2)]) == [bytes_of(1, 5000), None]
    assert put(reader, item_of(2)) == [PutStatus.READ_ONLY]
    assert reader.epoch(b"n" * 16) == epoch
    reader.discard(name_of(1), 0)
    reader.touch_many([name_of(1)])
    reader.maintain()
    reader.close()
    after = {p: p.read_bytes() for p in (tmp_path / "store").rglob("*") if p.is_file() and p.name != "lock.mdb"}
    assert after == before


def test_read_only_of_nothing_is_refused_and_makes_nothing(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="no NVMe store"):
        opener(read_only=True)
    assert not (tmp_path / "store").exists()


def test_a_disk_that_fills_up_refuses_then_heals(opener: Opener, small_disk: Path) -> None:
    foreign = small_disk / "foreign"
    foreign.write_bytes(bytes(8 * MIB))
    backend = opener(small_disk / "store", capacity_bytes=64 * MIB, block_bytes=MIB)
    statuses = put_each(backend, range(40), MIB)
    assert set(statuses) <= {PutStatus.STORED, PutStatus.FULL}
    assert statuses[-10:].count(PutStatus.STORED) >= 7
    assert backend.usage().evicted > 0
    for i, data in enumerate(read(backend, [name_of(i) for i in range(40)])):
        assert data in {None, bytes_of(i, MIB)}
    foreign.unlink()
    assert put_each(backend, range(100, 110), MIB).count(PutStatus.STORED) >= 9
    assert backend.usage().file_bytes > 8 * MIB


def test_no_room_for_a_new_store_is_told(opener: Opener, small_disk: Path) -> None:
    full = small_disk / "foreign"
    with full.open("wb", buffering=0) as f:
        for step in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while f.write(bytes(step)):
                    pass
    with pytest.raises(BackendFullError, match="free disk space"):
        opener(small_disk / "store", capacity_bytes=8 * MIB)
    full.unlink()
    assert put(opener(small_disk / "store", capacity_bytes=8 * MIB), item_of(1)) == [PutStatus.STORED]


@pytest.mark.parametrize("error", [28, 122, 5, 24])
def test_a_failed_write_is_reported_and_invisible(opener: Opener, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    backend = opener()
    put(backend, item_of(1))

    def fail(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        status = put(backend, item_of(2))[0]
    assert status is (PutStatus.FULL if error in {28, 122} else PutStatus.UNAVAILABLE)
    assert read(backend, [name_of(1), name_of(2)]) == [bytes_of(1, 5000), None]
    assert put(backend, item_of(2)) == [PutStatus.STORED]


def test_a_failed_sync_is_not_durable(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener(durability="durable")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        assert put(backend, item_of(1)) == [PutStatus.UNAVAILABLE]
    assert read(backend, [name_of(1)]) == [None]
    assert put(backend, item_of(1)) == [PutStatus.STORED]


def test_durable_puts_are_synced_before_they_are_reported(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def noted(fd: int) -> None:
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", noted)
    put(opener(), item_of(1))
    assert synced == []
    put(opener(durability="durable"), item_of(2), item_of(3))
    assert len(synced) == 1  # one for all records of a call


@pytest.mark.parametrize("short", ["read", "written"])
def test_short_transfers_are_completed(opener: Opener, monkeypatch: pytest.MonkeyPatch, short: str) -> None:
    backend = opener()
    name = "preadv" if short == "read" else "pwritev"
    real = getattr(os, name)

    def halved(fd: int, vectors: list[memoryview], at: int, flags: int = 0) -> int:
        total = sum(v.nbytes for v in vectors)
        half: list[memoryview] = []
        room = max(1, total // 2)
        for view in vectors:
            half.append(view[:room])
            room -= half[-1].nbytes
        joined = [v for v in half if v.nbytes]
        try:
            return int(real(fd, joined, at, flags))
        except OSError:
            return int(real(fd, vectors, at, flags))

    monkeypatch.setattr(os, name, halved)
    assert put(backend, item_of(1, 100_000), item_of(2, 5)) == [PutStatus.STORED] * 2
    assert read(backend, [name_of(1), name_of(2)]) == [bytes_of(1, 100_000), bytes_of(2, 5)]


def test_direct_io_refused_falls_back_and_says_so(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    backend = opener()
    put(backend, item_of(1, 100_001))
    assert read(backend, [name_of(1)]) == [bytes_of(1, 100_001)]
    assert backend.describe()["io"].startswith("buffered")
    backend.close()
    with pytest.raises(ConfigError, match="'direct'"):
        opener(options={"direct": True})


def test_direct_io_refused_later_falls_back_too(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    if backend.describe()["io"] != "direct":
        pytest.skip("this file system refuses direct I/O")
    real = os.pwritev

    def refuse(fd: int, vectors: list[memoryview], at: int, flags: int = 0) -> int:
        if _is_direct(fd):
            raise OSError(22, "Invalid argument")
        return real(fd, vectors, at, flags)

    monkeypatch.setattr(os, "pwritev", refuse)
    assert put(backend, item_of(1, 50_000)) == [PutStatus.STORED]
    assert backend.describe()["io"] == "buffered"
    assert read(backend, [name_of(1)]) == [bytes_of(1, 50_000)]


def _is_direct(fd: int) -> bool:
    flags = next(line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if line.startswith("flags"))
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)


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
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    statuses = []
    for _ in range(3):
        for one in (backend, beside):
            one.maintain()
            assert one._session is not None
            one._session._next_open = 0.0  # not a second later, but now
        statuses = [put(backend, item_of(2))[0], put(beside, item_of(3))[0]]
    assert set(statuses) <= {PutStatus.STORED, PutStatus.EXISTS}
    assert read(backend, [name_of(1), name_of(2), name_of(3)]) == [None, bytes_of(2, 5000), bytes_of(3, 5000)]
    assert (store / "seg-0000").stat().st_size > 0
    assert len([w for w in warnings() if "was replaced" in w]) == 1


def test_a_segment_removed_while_open_is_forgotten_and_made_anew(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    (tmp_path / "store" / "seg-0000").unlink()
    backend.maintain()
    assert read(backend, [name_of(1)]) == [None]
    assert put(backend, item_of(2)) == [PutStatus.STORED]
    assert read(backend, [name_of(2)]) == [bytes_of(2, 5000)]
    assert (tmp_path / "store" / "seg-0000").stat().st_size > 0


def test_too_many_open_files_are_a_status(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    put(backend, item_of(1))
    backend.close()
    again = opener()
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if "seg-" in str(path):
            raise OSError(24, "Too many open files")
        return real(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert again.get_many([name_of(1)], lambda *_: None, call()) == [ReadStatus.UNAVAILABLE]
        assert put(again, item_of(2)) == [PutStatus.UNAVAILABLE]
    assert read(again, [name_of(1)]) == [bytes_of(1, 5000)]
    assert put(again, item_of(2)) == [PutStatus.STORED]


def _diagnose(path: Path, **context: int) -> dict[str, list[str]]:
    options = NvmeOptions(path=str(path))
    found = diagnose(BackendContext(tier="l2", options=options, logger=logging.getLogger("test"), **context))  # type: ignore[arg-type]
    assert all(finding.advice for finding in found if finding.level != "ok")
    return {level: [f.what for f in found if f.level == level] for level in ("ok", "warning", "problem")}


def test_the_doctor_finds_a_good_place_good(tmp_path: Path) -> None:
    found = _diagnose(tmp_path / "store", capacity_bytes=8 * MIB)
    assert found["problem"] == []
    assert any("can be made" in what for what in found["ok"])
    assert any("direct I/O" in what for what in found["ok"] + found["warning"])
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert any("not a directory" in what for what in _diagnose(tmp_path / "file")["problem"])
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert any("0777" in what for what in _diagnose(tmp_path / "open")["warning"])
    assert any("capacity" in what for what in _diagnose(tmp_path / "store", capacity_bytes=1 << 60)["warning"])
    assert _diagnose(Path())["problem"] == []

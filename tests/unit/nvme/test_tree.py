"""The tree layout: plain files that any number of machines share."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvstore_nvme import tree_medium, tree_temporaries
from kvstore_nvme.tree_files import write_file
from kvstore_nvme.tree_temporaries import is_stale, is_temporary, new_name

from kvstore.backend import PutItem
from kvstore.config import load_config
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.objects.naming import key_of
from kvstore.types import Call, Presence, PutStatus
from tests.unit.objects.mem import PREFIX, call_for, chain, content, items_of, put, read
from tests.unit.objects.trees import BLOCK_BYTES, Opener, files_in, openings, run, script, taken_bytes

NAMES = chain("tree", 64)
EXPECTED = [content(name, BLOCK_BYTES) for name in NAMES]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opener(store: Path) -> Iterator[Opener]:
    with openings(store) as opener:
        yield opener


def blocks(start: int = 0, stop: int = 64) -> list[PutItem]:
    return items_of(NAMES, start, stop, BLOCK_BYTES)


def eventually(law: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not law():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_prompt_is_one_private_file_per_pack(opener: Opener, store: Path) -> None:
    assert set(put(opener(), blocks())) == {PutStatus.STORED}
    assert [p.relative_to(store).as_posix() for p in files_in(store)] == sorted(
        key_of(NAMES[k]) for k in (15, 31, 47, 63)
    )
    for path in [store, *store.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert read(opener(), NAMES, call_for(NAMES)) == EXPECTED
    assert opener().exists_many(NAMES, call_for(NAMES, leading_only=True)) == [Presence.PRESENT] * 64


def test_many_records_spread_over_many_directories(opener: Opener, store: Path) -> None:
    backend = opener()
    names = chain("many", 3000)
    put(backend, [PutItem(name, [b"x"]) for name in names])
    counts = [len(list(path.iterdir())) for path in [store, *store.rglob("*")] if path.is_dir()]
    assert max(counts) <= 512
    assert len(files_in(store)) == 3000


def test_a_name_is_written_once_by_whoever_comes_first(opener: Opener) -> None:
    a, b = opener(), opener()
    assert put(a, [PutItem(b"name", [b"first"])]) == [PutStatus.STORED]
    assert put(b, [PutItem(b"name", [b"second"])]) == [PutStatus.EXISTS]
    assert read(b, [b"name"]) == [b"first"]


def test_a_file_that_vanished_is_a_miss_and_can_be_put_again(opener: Opener, store: Path) -> None:
    backend = opener()
    put(backend, blocks())
    for path in files_in(store):
        path.unlink()
    assert backend.exists_many(NAMES, call_for(NAMES)) == [Presence.ABSENT] * 64
    assert read(backend, NAMES, call_for(NAMES)) == [None] * 64
    backend.maintain()
    assert set(put(backend, blocks())) == {PutStatus.STORED}
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED


@pytest.mark.parametrize("damage", [b"", b"x", bytes(9000)])
def test_what_a_power_cut_leaves_is_a_miss_and_gives_way(opener: Opener, store: Path, damage: bytes) -> None:
    put(opener(), blocks(0, 16))
    (path,) = files_in(store)
    path.write_bytes(damage)
    backend = opener()
    assert backend.exists_many(NAMES[:16], call_for(NAMES)) == [Presence.ABSENT] * 16
    assert set(put(backend, blocks(0, 16))) == {PutStatus.STORED}
    path.write_bytes(damage)
    assert read(backend, NAMES[:16], call_for(NAMES)) == [None] * 16
    assert not path.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_nothing_but_a_plain_file_is_read(opener: Opener, store: Path, tmp_path: Path, kind: str) -> None:
    backend = opener()
    put(backend, blocks(0, 16))
    (path,) = files_in(store)
    secret = tmp_path / "secret"
    path.rename(secret)
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert read(backend, NAMES[:16], call_for(NAMES)) == [None] * 16
    assert backend.exists_many(NAMES[:16], call_for(NAMES)) == [Presence.ABSENT] * 16
    status = set(put(backend, blocks(0, 16)))
    assert status == ({PutStatus.UNAVAILABLE} if kind == "directory" else {PutStatus.STORED})
    assert secret.exists()


def test_foreign_files_stay(opener: Opener, store: Path) -> None:
    backend = opener(capacity_bytes=8 << 20)
    put(backend, blocks())
    foreign = [store / "README", store / "aa/notes.txt", files_in(store)[0].parent / "more", store / ".hidden"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    backend.drop(PREFIX[:16])
    for _ in range(5):
        backend.maintain()
    for k in range(40):
        put(backend, items_of(chain(k, 64), 0, 64, BLOCK_BYTES))
    backend.gc(max_bytes=0)
    assert [path.read_text() for path in foreign] == ["mine"] * 4
    assert read(backend, NAMES, call_for(NAMES)) == [None] * 64


def test_empty_directories_of_dropped_names_go(opener: Opener, store: Path) -> None:
    backend = opener()
    put(backend, blocks())
    backend.drop(PREFIX[:16])
    for _ in range(20):
        backend.maintain()
    backend.usage()
    assert not [path for path in store.rglob("*/*") if path.is_dir() and path.parent.parent == store]
    assert set(put(backend, blocks())) == {PutStatus.STORED}


def test_what_this_process_is_writing_is_counted_once(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    medium = backend._session.store.medium  # type: ignore[union-attr]
    overheads: list[int] = []

    def write_and_walk(path: str, buffers: list[bytes], *, sync: bool) -> None:
        write_file(path, buffers, sync=sync)
        assert len(list(medium.entries("", Call.within(5.0)))) >= 1
        overheads.append(medium.overhead_bytes())

    put(backend, blocks(0, 16))
    monkeypatch.setattr(tree_medium, "write_file", write_and_walk)
    put(backend, blocks(16, 32))
    assert overheads
    assert all(nbytes % 4096 == 0 and nbytes < 16 * BLOCK_BYTES for nbytes in overheads)


def test_temporaries_tell_whether_their_writer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    mine = new_name()
    assert is_temporary(mine)
    assert new_name() != mine
    assert not is_stale(mine, now - 1e6)
    machine, pid, start, rest = mine.removeprefix(".tmp-").split("-")
    assert is_stale(f".tmp-{machine}-{pid}-{int(start) + 1}-{rest}", now), "the id was given to a later process"
    child = subprocess.run(["true"], check=True, capture_output=True)
    assert child.returncode == 0
    gone = next(p for p in range(4_000_000, 4_200_000) if not Path(f"/proc/{p}").exists())
    assert is_stale(f".tmp-{machine}-{gone}-{start}-{rest}", now)
    elsewhere = f".tmp-{'0' * 16}-{pid}-{start}-{rest}"
    assert not is_stale(elsewhere, now)
    assert is_stale(elsewhere, now - 4000)
    for foreign in (".tmp-x", "a" + mine, mine + "0", ".tmp-0-0-0-0"):
        assert not is_temporary(foreign)
        assert not is_stale(foreign, 0.0)
    monkeypatch.setattr(tree_temporaries, "_start_of", lambda _pid: None)
    assert not is_stale(f".tmp-{machine}-{os.getpid()}-0-{rest}", now), "without /proc a living process keeps its files"


def test_a_writer_killed_before_publishing_leaves_nothing(opener: Opener, store: Path) -> None:
    killed = run(
        "os.link = lambda *a: os.kill(os.getpid(), 9)\nput(start(), items_of(chain('tree', 64), 0, 16, 4000))", store
    )
    assert killed.returncode == -9, killed.stderr
    left = files_in(store)
    assert left
    assert all(path.name.startswith(".tmp-") for path in left)
    backend = opener()
    eventually(lambda: not files_in(store))
    assert read(backend, NAMES[:16], call_for(NAMES)) == [None] * 16
    assert set(put(backend, blocks(0, 16))) == {PutStatus.STORED}


def test_what_a_killed_writer_acknowledged_is_there(opener: Opener, store: Path) -> None:
    code = """
    backend = start()
    for k in range(100000):
        put(backend, items_of(chain(k, 16), 0, 16, 4000))
        print(k, flush=True)
    """
    for _ in range(3):
        process = subprocess.Popen(script(code, store), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(25)]
        process.kill()
        process.communicate(timeout=20)
        backend = opener()
        for k in acknowledged:
            names = chain(k, 16)
            assert read(backend, names, call_for(names)) == [content(name, BLOCK_BYTES) for name in names]
        eventually(lambda: not [path for path in files_in(store) if path.name.startswith(".")])


def test_the_disk_holds_no_more_than_the_capacity_at_any_moment(opener: Opener, store: Path) -> None:
    capacity = 8 << 20
    backend = opener(capacity_bytes=capacity)
    stop = threading.Event()
    samples: list[int] = []

    def sample() -> None:
        while not stop.is_set():
            samples.append(taken_bytes(store))
            time.sleep(0.005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    for k in range(80):
        assert set(put(backend, items_of(chain(k, 64), 0, 64, BLOCK_BYTES))) == {PutStatus.STORED}
    stop.set()
    sampler.join()
    assert len(samples) > 5
    assert max(samples) <= 1.02 * capacity
    usage = backend.usage()
    assert usage.evicted > 1000
    assert usage.payload_bytes >= 0.6 * capacity
    assert taken_bytes(store) <= usage.file_bytes + 4096
    newest = chain(79, 64)
    assert backend.exists_many(newest, call_for(newest)).count(Presence.PRESENT) == 64


def test_two_processes_write_and_sweep_at_once(opener: Opener, store: Path) -> None:
    code = """
    backend = start(capacity_bytes=8 << 20)
    for k in range(60):
        statuses = put(backend, items_of(chain(k, 64), 0, 64, 4000))
        assert set(statuses) <= {PutStatus.STORED, PutStatus.EXISTS}, statuses
        names = chain(k // 2, 64)
        for name, found in zip(names, read(backend, names, call_for(names))):
            assert found in (None, content(name, 4000))
        backend.maintain()
    backend.close()
    """
    processes = [subprocess.Popen(script(code, store), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    backend = opener(capacity_bytes=8 << 20)
    assert backend.usage().payload_bytes <= 8 << 20
    assert taken_bytes(store) <= 1.02 * (8 << 20)
    assert not [path for path in files_in(store) if path.name.startswith(".")]


def test_puts_of_one_process_are_hits_of_another_at_once(opener: Opener, store: Path) -> None:
    backend = opener()
    assert backend.exists_many(NAMES, call_for(NAMES)) == [Presence.ABSENT] * 64
    written = run("put(start(), items_of(chain('tree', 64), 0, 64, 4000))", store)
    assert written.returncode == 0, written.stderr
    assert backend.exists_many(NAMES, call_for(NAMES)) == [Presence.PRESENT] * 64
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED


def test_a_directory_that_cannot_be_a_tree_is_refused(opener: Opener, tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.write_text("x")
    with pytest.raises(ConfigError, match="no directory"):
        opener(plain)
    segments = tmp_path / "segments"
    segments.mkdir()
    (segments / "seg-0000").write_bytes(b"")
    with pytest.raises(ConfigError, match="segments"):
        opener(segments)
    with pytest.raises(BackendUnavailableError, match="read-only"):
        opener(tmp_path / "absent", read_only=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BackendUnavailableError, match="no tree"):
        opener(tmp_path / "empty", read_only=True)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "format").write_bytes(b"kvstore tree 2\n")
    with pytest.raises(BackendUnavailableError, match="upgrade"):
        opener(newer)
    with pytest.raises(ConfigError, match="'pack': got 3"):
        opener(pack=3)


@pytest.mark.parametrize("left", [b"", bytes(15), b"kvstore", b"kvstore" + bytes(8)])
def test_a_mark_that_a_power_cut_left_in_part_is_made_whole(opener: Opener, store: Path, left: bytes) -> None:
    put(opener(), blocks())
    (store / "format").write_bytes(left)
    assert read(opener(read_only=True), NAMES, call_for(NAMES)) == EXPECTED
    assert read(opener(), NAMES, call_for(NAMES)) == EXPECTED
    assert (store / "format").read_bytes() == b"kvstore tree 1\n"


def test_a_reader_opened_read_only_serves_and_changes_nothing(opener: Opener, store: Path) -> None:
    put(opener(), blocks())
    before = sorted((p, p.lstat().st_mtime_ns) for p in store.rglob("*"))
    backend = opener(read_only=True)
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED
    backend.touch_many(NAMES)
    backend.maintain()
    assert put(backend, blocks(0, 1)) == [PutStatus.READ_ONLY]
    assert backend.usage().records == 64
    assert sorted((p, p.lstat().st_mtime_ns) for p in store.rglob("*")) == before


def test_a_use_makes_a_file_young_again(opener: Opener, store: Path) -> None:
    backend = opener()
    put(backend, blocks())
    for path in files_in(store):
        os.utime(path, (1.0, 1.0))
    backend.exists_many(NAMES, call_for(NAMES))
    backend.touch_many(NAMES[:32][::-1])
    backend.maintain()
    ages = [time.time() - (store / key_of(NAMES[k])).stat().st_mtime for k in (15, 31, 47, 63)]
    assert [age < 60.0 for age in ages] == [True, True, False, False]
    assert ages[0] <= ages[1] + 1.0
    assert backend.delete_many(NAMES, Call.within(9.0)) == 64  # without a run, but seen before


@pytest.mark.parametrize(("name", "value"), [("pack", 3), ("pack", 0), ("pack", 512), ("path", ""), ("path", "a\0b")])
def test_a_wrong_option_is_named_when_the_config_is_read(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        load_config({"l2": [{"backend": "nvme", "layout": "tree", "path": "x", name: value}]})

"""Damaged files: no process dies of them, nothing wrong is served, new records are stored."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvstore_lmdb.quarantine import generations
from kvstore_lmdb.statefile import StateFile

from kvstore.errors import BackendPermissionError, BackendUnavailableError
from kvstore.types import PutStatus
from tests.unit.lmdb.stores import Opener, bytes_of, item_of, name_of, put, read, run

N = 60
NBYTES = 20_000
PAGE = 4096

JUDGE = f"""
import json, time
for line in sys.stdin:
    store = Path(line.strip())
    lines = []
    class Log(logging.Handler):
        def emit(self, record): lines.append(record.getMessage())
    log = logging.getLogger(store.name); log.handlers = [Log()]; log.propagate = False
    start = time.monotonic()
    backend = LmdbBackend()
    backend.open(BackendContext(tier="l2", options=LmdbOptions(path=str(store)), capacity_bytes=64 * MIB, logger=log))
    opened_s = time.monotonic() - start
    found = read(backend, [name_of(i) for i in range({N})])
    exact = sum(f == bytes_of(i, {NBYTES}) for i, f in enumerate(found))
    zeroed = sum(f is not None and f != bytes_of(i, {NBYTES}) for i, f in enumerate(found))
    listed = sum(1 for _ in backend.scan())
    new = put(backend, *[item_of(f"new{{i}}", 30_000) for i in range(12)])
    stored = read(backend, [name_of(f"new{{i}}") for i in range(12)]) == [bytes_of(f"new{{i}}", 30_000) for i in range(12)]
    backend.delete_many([name_of(i) for i in range({N})], call())
    put(backend, *[item_of(f"more{{i}}", 200_000) for i in range(8)])
    backend.maintain()
    backend.close()
    print(json.dumps(dict(name=store.name, opened_s=opened_s, exact=exact, zeroed=zeroed, listed=listed,
                          stored=stored, statuses=sorted({{s.value for s in new}}), warnings=lines)), flush=True)
"""


def judge(stores: list[Path]) -> list[dict[str, object]]:
    """Use the stores one after the other in one process; fail when it does not live to the end."""
    result = run("import logging\n" + JUDGE, stores[0], stdin="".join(f"{s}\n" for s in stores), timeout_s=120)
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    done = len(reports)
    assert result.returncode == 0, f"died with {result.returncode} on {stores[done].name}: {result.stderr[-2000:]}"
    return reports


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 60 records, closed cleanly."""
    store = tmp_path_factory.mktemp("pristine") / "store"
    fill = f"b = start(); put(b, *[item_of(i, {NBYTES}) for i in range({N})]); b.close()"
    assert run(fill, store).returncode == 0
    return store


def variant(pristine: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], *, killed: bool) -> Path:
    store = tmp_path / f"{name}-{'killed' if killed else 'closed'}"
    shutil.copytree(pristine, store)
    if killed:  # as kill -9 leaves it: the state file still says "open"
        state = store / "kvstore.state"
        state.write_text(state.read_text().replace('"clean"', '"open"'))
    damage(store / "data.mdb")
    return store


def truncate(nbytes: int) -> Callable[[Path], None]:
    return lambda data: os.truncate(data, nbytes)


def overwrite(at: int, what: bytes) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        with data.open("r+b") as f:
            f.seek(at)
            f.write(what)

    return damage


def replace_by_directory(data: Path) -> None:
    data.unlink()
    data.mkdir()


def spoil_lock(data: Path) -> None:
    (data.parent / "lock.mdb").write_bytes(os.urandom(5000))


def lock_directory(data: Path) -> None:
    (data.parent / "lock.mdb").unlink()
    (data.parent / "lock.mdb").mkdir()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_no_damage_kills_the_process_or_stops_new_records(pristine: Path, tmp_path: Path, killed: bool) -> None:
    size = (pristine / "data.mdb").stat().st_size
    rng = random.Random(7)
    damages: dict[str, Callable[[Path], None]] = {
        f"cut-{n}": truncate(n)
        for n in [0, 1, 100, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 65536, size // 2, size - 1, size - PAGE]
    }
    damages |= {f"cut-{i}-random": truncate(rng.randrange(size)) for i in range(14)}
    damages |= {f"zero-{i}": overwrite(rng.randrange(2, size // PAGE) * PAGE, bytes(PAGE)) for i in range(20)}
    damages |= {
        "metas": overwrite(0, bytes(2 * PAGE)),
        "meta-0": overwrite(0, bytes(PAGE)),
        "meta-1": overwrite(PAGE, bytes(PAGE)),
        "noise": overwrite(0, os.urandom(8192)),
        "tail-noise": overwrite(size // 2, os.urandom(size // 2)),
        "directory": replace_by_directory,
        "lock-noise": spoil_lock,
        "lock-directory": lock_directory,
        "gone": Path.unlink,
    }
    stores = [variant(pristine, tmp_path, n, d, killed=killed) for n, d in damages.items()]
    for report, store in zip(judge(stores), stores, strict=True):
        assert report["stored"] is True, report
        assert report["statuses"] == ["stored"], report
        assert report["opened_s"] < 5, report  # type: ignore[operator]
        kept = generations(store / "data.mdb")
        assert len(kept) <= 1, report
        assert len(report["warnings"]) == len(kept), report  # type: ignore[arg-type]
        if not kept:  # served where it lay: liblmdb found every record, and their checksums tell the damaged ones
            assert report["zeroed"] == 0 or report["name"].startswith(("zero", "cut", "tail")), report  # type: ignore[attr-defined]
        else:
            assert report["exact"] == report["listed"] == 0, report


@pytest.mark.slow
def test_flipped_bytes_in_tree_pages_kill_nothing(pristine: Path, tmp_path: Path) -> None:
    data = (pristine / "data.mdb").read_bytes()
    trees = [p for p in range(2, len(data) // PAGE) if data[p * PAGE + 10] in {1, 2} and data[p * PAGE + 11] == 0]
    rng = random.Random(3)
    stores = []
    for i in range(40):
        at = rng.choice(trees) * PAGE + rng.choice([rng.randrange(200), rng.randrange(PAGE)])
        flip = overwrite(at, bytes([data[at] ^ (1 << rng.randrange(8))]))
        stores.append(variant(pristine, tmp_path, f"flip-{i}-{at}", flip, killed=False))
    for report in judge(stores):
        assert report["stored"] is True, report
        assert report["statuses"] == ["stored"], report


def test_an_undamaged_store_is_served_whole_after_close_and_kill(pristine: Path, tmp_path: Path) -> None:
    stores = [variant(pristine, tmp_path, "same", lambda _: None, killed=k) for k in (False, True)]
    for report in judge(stores):
        assert (report["exact"], report["listed"], report["warnings"]) == (N, N, [])


@pytest.mark.parametrize("durability", ["cache", "durable"])
@pytest.mark.parametrize("damaged", [False, True])
def test_after_a_power_cut_the_file_is_checked_and_kept_only_if_sound(
    opener: Opener, tmp_path: Path, warnings: Callable[[], list[str]], durability: str, damaged: bool
) -> None:
    backend = opener(durability=durability)
    put(backend, *[item_of(i, NBYTES) for i in range(N)])
    backend.close()
    state = tmp_path / "store" / "kvstore.state"
    told = {**json.loads(state.read_text()), "phase": "open", "boot": "another boot"}
    state.write_text(json.dumps(told))
    if damaged:
        overwrite(4 * PAGE, bytes(60 * PAGE))(tmp_path / "store" / "data.mdb")
    found = read(opener(durability=durability), [name_of(i) for i in range(N)])
    assert found == ([None] * N if damaged else [bytes_of(i, NBYTES) for i in range(N)])
    assert len(warnings()) == damaged


def test_at_most_two_damaged_files_are_kept(opener: Opener, tmp_path: Path) -> None:
    data = tmp_path / "store" / "data.mdb"
    seen = []
    for round_ in range(4):
        backend = opener()
        assert put(backend, item_of(round_)) == [PutStatus.STORED]
        backend.close()
        overwrite(0, bytes([round_]) * 8192)(data)
        seen.append(data.read_bytes()[:1])
    opener().close()
    kept = generations(data)
    assert [k.read_bytes()[:1] for k in kept] == seen[-2:]
    assert not (tmp_path / "store" / "lock.mdb.corrupt").exists()


def test_a_read_only_open_changes_nothing_and_refuses_a_damaged_file(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    backend.close()
    data = tmp_path / "store" / "data.mdb"
    overwrite(0, bytes(8192))(data)
    before = sorted(p.name for p in data.parent.iterdir())
    with pytest.raises(BackendUnavailableError, match="damaged"):
        opener(read_only=True)
    assert sorted(p.name for p in data.parent.iterdir()) == before


def test_a_file_of_which_only_payload_was_cut_off_is_extended_and_served(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    for i in range(30):  # leaves free pages for the trees, so that the last record ends the file
        put(backend, item_of(i, 3000))
    put(backend, item_of("last", 1_000_000))
    last_page = int(backend.describe()["last_page"])
    backend.close()
    data = tmp_path / "store" / "data.mdb"
    size = data.stat().st_size
    os.truncate(data, size - 100_000)
    again = opener()
    assert data.stat().st_size >= (last_page + 1) * PAGE
    assert read(again, [name_of(i) for i in range(30)]) == [bytes_of(i, 3000) for i in range(30)]
    cut = read(again, [name_of("last")])[0]  # zeros at its end: the core's checksum makes it a miss
    assert cut is not None
    assert cut[:800_000] == bytes_of("last", 1_000_000)[:800_000]
    assert cut != bytes_of("last", 1_000_000)
    assert put(again, item_of("new")) == [PutStatus.STORED]


def test_a_symbolic_link_is_refused_and_its_target_left_alone(opener: Opener, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"precious")
    for name in ("data.mdb", "lock.mdb", "kvstore.state"):
        store = tmp_path / f"linked-{name}"
        store.mkdir(mode=0o700)
        (store / name).symlink_to(target)
        with pytest.raises(BackendPermissionError, match="symbolic link"):
            opener(store)
        assert target.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_without_permissions_is_used_again_by_its_owner(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    code = """
    os.setgid(65534); os.setuid(65534)
    b = start(); put(b, item_of(1)); b.close()
    (STORE / "data.mdb").chmod(0)
    b = start()
    assert read(b, [name_of(1)]) == [bytes_of(1, 5000)]
    b.close()
    """
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o711)  # so that somebody else gets through
    result = run(code, home / "store")
    assert result.returncode == 0, result.stderr


def test_a_large_check_gives_up_in_time(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    put(backend, *[item_of(i, 200) for i in range(3000)])
    backend.close()
    state = tmp_path / "store" / "kvstore.state"
    state.write_text(state.read_text().replace('"clean"', '"open"'))
    monkeypatch.setattr("kvstore_lmdb.guard._SHORT_CHECK_S", 0.0)
    start = time.monotonic()
    again = opener()  # the kernel of this boot still holds every write: trusted unchecked
    assert time.monotonic() - start < 2
    assert again.usage().records == 3000


def test_damage_met_while_running_makes_the_next_open_check(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    session = backend._session
    assert session is not None
    assert session.store is not None
    session.store.retire(suspect=True)
    assert read(backend, [name_of(1)]) == [None]
    assert put(backend, item_of(2)) == [PutStatus.STORED]  # reopened, checked, found sound
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]
    backend.close()
    state = StateFile(tmp_path / "store")
    found = state.read()
    state.close()
    assert found is not None
    assert found.phase == "clean"

"""A05: a database file damaged in any way costs a cold start at most, never the process or wrong bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.media import LmdbStore
from tests.faults.process import ROOT, Forge
from tests.faults.store import Store, over

N = 60
PAGE = 4096
FILL = f"""
with STORE.open() as cache:
    for i in range({N}):
        cache.put(unrelated(i), noise(SMALL, [i]))
    cache.flush(60)
"""
JUDGE = f"""
import logging
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("kvstore").addHandler(Lines(logging.WARNING))
logging.getLogger("kvstore").propagate = False
for root in ARGS:
    lines.clear()
    STORE = LmdbStore(Path(root))
    start = time.monotonic()
    cache = STORE.open()
    opened_s = time.monotonic() - start
    old = 0
    for i in range({N}):
        found = cache.fetch(unrelated(i))
        assert found is None or same(found, noise(SMALL, [i])), f"wrong bytes for {{i}} in {{root}}"
        old += found is not None
    for i in range(1000, 1010):
        cache.store(unrelated(i), noise(SMALL, [i]))
        assert same(cache.fetch(unrelated(i)), noise(SMALL, [i])), root
    cache.close()
    print(json.dumps(dict(root=root, opened_s=opened_s, old=old, warnings=lines)), flush=True)
"""


def cut(nbytes: int) -> Callable[[Path], None]:
    return lambda data: os.truncate(data, nbytes)


def put_bytes(at: int, what: bytes) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        with data.open("r+b") as f:
            f.seek(at)
            f.write(what)

    return damage


def make_directory(data: Path) -> None:
    data.unlink()
    data.mkdir()


def spoil_lock(data: Path) -> None:
    data.with_name("lock.mdb").write_bytes(os.urandom(8192))


def damages(size: int) -> dict[str, Callable[[Path], None]]:
    rng = random.Random(5)
    pages = {f"page-{p}-zeroed": put_bytes(p * PAGE, bytes(PAGE)) for p in rng.sample(range(2, size // PAGE), 20)}
    return {
        "cut-to-64KiB": cut(65536),
        "cut-to-half": cut(size // 2),
        "cut-to-4096": cut(4096),
        "cut-to-0": cut(0),
        "8KiB-noise": put_bytes(0, os.urandom(8192)),
        "metas-zeroed": put_bytes(0, bytes(2 * PAGE)),
        "directory": make_directory,
        "lock-noise": spoil_lock,
        **pages,
    }


@pytest.fixture
def filled(store: Store, forge: Forge) -> Path:
    forge.work(FILL, store)
    return store.root


@over("L")
def test_a_damaged_file_is_set_aside_and_the_store_works(
    store: Store, forge: Forge, filled: Path, tmp_path: Path
) -> None:
    roots = []
    for name, damage in damages((filled / "data.mdb").stat().st_size).items():
        root = tmp_path / name
        shutil.copytree(filled, root)
        damage(root / "data.mdb")
        roots.append(root)
    reports = use(forge, store, roots)
    assert len(reports) == len(roots) >= 25  # every one was opened, by a process that lived
    for report, root in zip(reports, roots, strict=True):
        kept = list(root.glob("*.corrupt-*"))
        assert report["opened_s"] < 5, report
        assert len(kept) <= 2, report
        assert len([line for line in report["warnings"] if "kept as" in line]) == bool(kept), report
        assert len(report["warnings"]) <= 2, report  # ... and at most one about a page met later
        assert report["old"] > 0 or kept or root.name == "cut-to-0", report
    intact = use(forge, store, [filled])[0]
    assert (intact["old"], intact["warnings"]) == (N, [])


def use(forge: Forge, store: Store, roots: list[Path]) -> list[dict[str, Any]]:
    """Use databases one after the other in one process, which must live to the end."""
    with forge.start(JUDGE, store, *roots) as worker:
        reports = [json.loads(line) for line in worker.lines()]
        culprit = roots[len(reports)].name if len(reports) < len(roots) else "the exit"
        assert worker.exit_code == 0, f"{worker.exit_code} at {culprit}: {worker.errors}"
    return reports


@over("L")
def test_repeated_damage_keeps_two_generations(store: Store, forge: Forge) -> None:
    for round_ in range(4):
        forge.work(FILL, store)
        put_bytes(0, bytes([round_]) * 8192)(store.root / "data.mdb")
    assert use(forge, store, [store.root])[0]["old"] == 0
    assert len(list(store.root.glob("data.mdb.corrupt-*"))) == 2


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that another user gets through to; pytest's own are for one user only."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


@over("L")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_of_mode_000_is_used_again_by_its_owner(store: Store, forge: Forge, home: Path) -> None:
    theirs = LmdbStore(home / "theirs" / "store")
    theirs.root.parent.mkdir()
    os.chown(theirs.root.parent, 65534, 65534)
    become = "os.setgid(65534); os.setuid(65534)"
    forge.work(f"{become}{FILL}", theirs)
    (theirs.root / "data.mdb").chmod(0)
    report = forge.work(f"{become}{JUDGE}", theirs, theirs.root)
    assert report["opened_s"] < 5
    assert report["old"] == N or list(theirs.root.glob("*.corrupt-*"))


CUT_WHILE_OPEN = f"""
cache = STORE.open()
os.truncate(STORE.root / "data.mdb", (STORE.root / "data.mdb").stat().st_size // 2)
for i in [*range({N})] * 2:
    found = cache.fetch(unrelated(i))
    assert found is None or same(found, noise(SMALL, [i]))
print("null")
"""


@over("L")
def test_a_cut_under_an_open_store_is_documented_and_never_wrong_bytes(
    store: Store, forge: Forge, filled: Path
) -> None:
    page = (ROOT / "docs" / "reference" / "backends" / "lmdb.md").read_text()
    assert "SIGBUS" in page
    assert "refused at open unless `allow_network_fs`" in page
    with forge.start(CUT_WHILE_OPEN, store) as worker:
        said = list(worker.lines())
        assert worker.exit_code in {0, -signal.SIGBUS}, (said, worker.errors)
    report = use(forge, store, [filled])[0]  # and the next start is no crash loop
    assert report["opened_s"] < 5

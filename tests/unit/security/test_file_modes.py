"""Whatever kvstore makes is for its owner alone, also where the umask forbids nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.demo import command
from kvstore.cli.demo.facts import Outcome
from kvstore.cli.demo.options import DemoOptions
from kvstore.cli.demo.store import empty_store
from kvstore.cli.main import main
from tests.faults.media import MEDIA
from tests.faults.store import Store
from tests.support_faults import SMALL, noise, unrelated
from tests.unit.cli.stores import damage, fill

ON_DISK = ("lmdb", "nvme", "tree")


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty folder; everything below it was made by kvstore."""
    made = tmp_path / "home"
    made.mkdir()
    return made


def open_to_others(folder: Path) -> dict[str, str]:
    """What others may read, write or enter below a folder, with its mode."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}
    assert found, "nothing was made"
    return {str(path.relative_to(folder)): f"{mode:04o}" for path, mode in found.items() if mode & 0o077}


def filled(store: Store) -> None:
    with store.open(capacity="4MiB") as cache:
        for i in range(160):  # more than fits, so that blocks are evicted
            cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        cache.fetch(unrelated(159))


def test_what_others_may_do_is_found(home: Path) -> None:
    (home / "a").mkdir(mode=0o710)
    (home / "a" / "b").touch(mode=0o604)
    (home / "c").touch(mode=0o600)
    assert open_to_others(home) == {"a": "0710", "a/b": "0604"}


@pytest.mark.parametrize("kind", ON_DISK)
def test_a_store_and_the_folders_above_it_that_it_made(kind: str, home: Path) -> None:
    store = MEDIA[kind].make(home / "made" / "too" / "store")
    filled(store)
    store.close()
    assert open_to_others(home) == {}


@pytest.mark.parametrize("kind", ON_DISK)
def test_a_store_in_a_folder_that_was_there_leaves_that_alone(kind: str, home: Path) -> None:
    (home / "there").mkdir()
    (home / "there").chmod(0o750)
    filled(MEDIA[kind].make(home / "there" / "store"))
    assert open_to_others(home) == {"there": "0750"}


@pytest.mark.parametrize("kind", ["lmdb", "nvme"])
def test_what_is_set_aside_after_damage(kind: str, home: Path) -> None:
    store = MEDIA[kind].make(home / "store")
    filled(store)
    (data,) = store.root.rglob("data.mdb")
    with data.open("r+b") as f:
        f.write(bytes(8192))
    filled(store)
    assert [path for path in store.root.rglob("*") if "corrupt" in path.name], "nothing was set aside"
    assert open_to_others(home) == {}


def test_a_config_that_init_wrote(home: Path) -> None:
    config = home / "kvstore.toml"
    assert main(["init", str(config), "--backend", "s3"]) == 0
    assert open_to_others(home) == {}
    config.chmod(0o644)
    assert main(["init", str(config), "--force"]) == 0
    assert open_to_others(home) == {}


def test_an_archive_that_export_wrote_and_what_verify_sets_aside(home: Path) -> None:
    names = fill(home / "store")
    damage(home / "store", names[1], at=5000)
    archive, aside = home / "archive.tar", home / "set" / "aside"
    main(["export", str(home / "store"), "--to", str(archive)])
    assert archive.stat().st_size > 10_000
    assert main(["verify", str(home / "store"), "--quarantine", str(aside)]) == 1
    assert len([*aside.iterdir()]) == 2  # the record, and a line about it
    assert open_to_others(home) == {}


def test_the_demos_store_and_report(home: Path, outcome: Outcome) -> None:
    options = DemoOptions(
        synthetic=False,
        tokens=300,
        new_tokens=8,
        min_ratio=0.0,
        dtype="bfloat16",
        report=home / "other" / "report",
        store=home / "some" / "store",
        as_json=False,
    )
    with empty_store(options.store) as folder:
        filled(MEDIA["lmdb"].make(folder / "lmdb"))
    assert command._report(options, outcome) == 0
    names = {path.name for path in (home / "other" / "report").iterdir()}
    assert "report.html" in names
    assert open_to_others(home) == {}

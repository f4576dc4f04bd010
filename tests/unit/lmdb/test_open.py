"""What is accepted and refused at open, and what is left on the disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from kvstore_lmdb import directory
from kvstore_lmdb.backend import LmdbBackend
from kvstore_lmdb.environment import TREES, Environment
from kvstore_lmdb.statefile import StateFile

from kvstore.backend import BackendContext
from kvstore.errors import (
    BackendPermissionError,
    BackendUnavailableError,
    ConfigError,
)
from kvstore.types import PutStatus
from tests.unit.lmdb.stores import MIB, Opener, bytes_of, call, item_of, name_of, put, read, run


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_directory_and_files_are_private_under_any_umask(opener: Opener, tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        opener(namespace=b"n" * 16, namespace_json='{"model": "m"}')
    finally:
        os.umask(old)
    store = tmp_path / "store"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in store.rglob("*")}
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert {name: mode & 0o077 for name, mode in modes.items()} == dict.fromkeys(modes, 0)
    assert {modes[n] for n in ("data.mdb", "lock.mdb", "kvstore.state")} == {0o600}


def test_a_directory_others_may_write_to_is_announced(
    opener: Opener, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    opener()
    assert len(warnings()) == 1
    assert "mode 0777" in warnings()[0]


def test_a_namespace_is_described_beside_the_data(opener: Opener, tmp_path: Path) -> None:
    for text in ('{"model": "a"}', '{"model": "b"}'):
        opener(namespace=b"\xab" * 16, namespace_json=text).close()
        folder = tmp_path / "store" / "namespaces"
        assert [p.name for p in folder.iterdir()] == ["ab" * 16 + ".json"]
        assert (folder / ("ab" * 16 + ".json")).read_text() == text


def test_a_linked_namespace_folder_is_not_followed(
    opener: Opener, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store" / "namespaces").symlink_to(outside)
    backend = opener(namespace=b"n" * 16)
    assert list(outside.iterdir()) == []
    assert put(backend, item_of(1)) == [PutStatus.STORED]
    assert "symbolic link" in warnings()[0]


MOUNTS = """/dev/vda / ext4 rw 0 0
server:/x /mnt/shared nfs4 rw 0 0
host /mnt/fu\\040se fuse.sshfs rw 0 0
/dev/vdb /mnt/shared/local xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/srv/kv", "ext4", False),
        ("/mnt/shared/kv", "nfs4", True),
        ("/mnt/shared", "nfs4", True),
        ("/mnt/sharedness", "ext4", False),
        ("/mnt/shared/local/kv", "xfs", False),
        ("/mnt/fu se/kv", "fuse.sshfs", True),
    ],
)
def test_the_innermost_mount_names_the_file_system(path: str, kind: str, network: bool) -> None:
    assert directory.file_system(Path(path), MOUNTS) == kind
    assert directory.is_network(kind) is network


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"server:/x {tmp_path} nfs rw 0 0\n")
    monkeypatch.setattr(directory, "_MOUNTS", table)


@pytest.mark.usefixtures("on_nfs")
def test_a_network_file_system_is_refused_before_anything_is_created(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"nfs.*allow_network_fs"):
        opener()
    assert not (tmp_path / "store").exists()


@pytest.mark.usefixtures("on_nfs")
def test_a_network_file_system_may_be_allowed_with_a_warning(opener: Opener, warnings: Callable[[], list[str]]) -> None:
    backend = opener(options={"allow_network_fs": True})
    assert put(backend, item_of(1)) == [PutStatus.STORED]
    assert len(warnings()) == 1
    assert backend.describe()["file_system"] == "nfs"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_readers": 10}, "max_readers"),
        ({"max_readers": 1 << 20}, "max_readers"),
        ({"map_size": MIB}, "map_size"),
        ({"map_size": 1 << 45}, "map_size"),
    ],
)
def test_a_wrong_option_is_named_and_creates_nothing(
    opener: Opener, tmp_path: Path, options: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        opener(options=options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_an_impossible_path_is_a_config_error(path: str) -> None:
    from kvstore_lmdb.options import LmdbOptions

    with pytest.raises(ConfigError, match="path"):
        LmdbBackend().open(BackendContext(tier="t", options=LmdbOptions(path=path)))


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(ConfigError, match="LmdbOptions"):
        LmdbBackend().open(BackendContext(tier="t", options={"path": "x"}))


def test_options_reach_the_environment(opener: Opener) -> None:
    facts = opener(options={"map_size": 1 << 31, "max_readers": 2000}).describe()
    assert facts["map_bytes"] == str(1 << 31)
    assert 2000 <= int(facts["readers"].split()[2]) < 2100
    assert facts["durability"] == "cache"


def test_a_larger_map_of_an_earlier_run_is_kept(opener: Opener) -> None:
    backend = opener(options={"map_size": 1 << 37})
    put(backend, item_of(1))
    backend.close()
    assert opener().describe()["map_bytes"] == str(1 << 37)


def test_a_file_in_place_of_the_directory_is_told(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(BackendUnavailableError, match="not a directory"):
        opener()


def test_another_programs_database_is_left_alone(opener: Opener, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with lmdb.open(str(store)) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"precious")
    with pytest.raises(ConfigError, match="another program"):
        opener()
    with lmdb.open(str(store)) as env, env.begin() as txn:
        assert txn.get(b"theirs") == b"precious"


@pytest.mark.parametrize("made", [0, 1, 3])
def test_a_process_that_died_while_it_made_the_trees_leaves_no_unusable_store(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvstore_lmdb.environment.TREES", TREES[:made])
        with pytest.raises(TypeError):
            opener()
    backend = opener()
    assert put(backend, item_of(0)) == [PutStatus.STORED]


def test_durable_and_cache_do_not_mix_in_one_process(opener: Opener) -> None:
    opener(durability="durable")
    with pytest.raises(ConfigError, match="durability"):
        opener(durability="cache")


def test_durable_and_cache_do_not_mix_over_processes(opener: Opener, tmp_path: Path) -> None:
    opener(durability="durable")
    result = run("start()", tmp_path / "store")
    assert result.returncode != 0
    assert "option 'durability'" in result.stderr


def test_durable_syncs_each_transaction(opener: Opener) -> None:
    backend = opener(durability="durable")
    session = backend._session
    assert session is not None
    assert session.store is not None
    flags = session.store.env.flags()
    assert (flags["sync"], flags["metasync"], flags["writemap"], flags["readahead"]) == (True, False, False, True)


class CountingSync:
    """A real environment whose syncs are counted, or fail."""

    def __init__(self, env: lmdb.Environment, error: Exception | None) -> None:
        self._env = env
        self._error = error
        self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def sync(self, force: bool) -> None:
        self.syncs += 1
        if self._error is not None:
            raise self._error
        self._env.sync(force)


@pytest.mark.parametrize("durability", ["cache", "durable"])
def test_durable_brings_the_last_meta_page_to_the_medium_once_a_call(opener: Opener, durability: str) -> None:
    backend = opener(durability=durability)
    assert backend._session is not None
    writer: Any = backend._session.writer
    writer._env = env = CountingSync(writer._env, None)
    assert set(put(backend, *[item_of(i) for i in range(100)])) == {PutStatus.STORED}
    put(backend, item_of(1))
    assert env.syncs == (durability == "durable")


def test_a_put_that_could_not_be_synced_is_not_reported_as_stored(opener: Opener) -> None:
    backend = opener(durability="durable")
    assert backend._session is not None
    writer: Any = backend._session.writer
    put(backend, item_of(0))
    writer._env = CountingSync(writer._env, lmdb.DiskError("no space"))
    assert put(backend, item_of(0), item_of(1)) == [PutStatus.EXISTS, PutStatus.UNAVAILABLE]


def test_reading_a_store_that_is_not_there_creates_nothing(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError):
        opener(read_only=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "beside-a-writer"])
def test_a_read_only_open_serves_and_refuses(opener: Opener, shared: bool) -> None:
    writer = opener()
    put(writer, item_of(1))
    epoch = writer.epoch(b"n" * 16)
    if not shared:
        writer.close()
    backend = opener(read_only=True, capacity_bytes=None)
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]
    assert put(backend, item_of(2)) == [PutStatus.READ_ONLY]
    assert backend.epoch(b"n" * 16) == epoch
    assert backend.epoch(b"m" * 16) == bytes(8)
    assert [i.name for i in backend.scan()] == [name_of(1)]
    assert backend.usage().capacity_bytes == 64 * MIB
    backend.touch_many([name_of(1)])
    backend.drop(b"x")
    backend.discard(name_of(1), 0)
    backend.maintain()
    with pytest.raises(BackendPermissionError, match="read-only"):
        backend.delete_many([name_of(1)], call())
    with pytest.raises(BackendPermissionError, match="read-only"):
        backend.epoch(b"n" * 16, bump=True)
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]


def test_a_writable_open_beside_a_read_only_one_of_this_process_is_told(opener: Opener) -> None:
    opener().close()
    opener(read_only=True)
    with pytest.raises(BackendUnavailableError, match="read-only in this process"):
        opener()


def test_a_clean_close_is_noted_only_by_the_last_user(opener: Opener, tmp_path: Path) -> None:
    def phase() -> str:
        return str(json.loads((tmp_path / "store" / "kvstore.state").read_bytes())["phase"])

    one = opener()
    code = "b = start(); put(b, item_of(1)); b.close()"
    assert run(code, tmp_path / "store").returncode == 0
    assert phase() == "open"
    one.close()
    assert phase() == "clean"


def test_the_state_file_tells_an_untouched_file_from_a_touched_one(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    backend.close()
    data = tmp_path / "store" / "data.mdb"
    state = StateFile(tmp_path / "store")
    found = state.read()
    state.close()
    assert found is not None
    assert found.matches(data.stat())
    with data.open("r+b") as f:
        f.write(f.read(1))
    assert not found.matches(data.stat())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "phase": "clean", "odd": 1}'])
def test_an_unreadable_state_file_costs_a_check_and_nothing_else(opener: Opener, tmp_path: Path, text: str) -> None:
    backend = opener()
    put(backend, item_of(1))
    backend.close()
    (tmp_path / "store" / "kvstore.state").write_text(text)
    assert read(opener(), [name_of(1)]) == [bytes_of(1, 5000)]


def test_a_store_of_a_newer_format_is_refused(opener: Opener) -> None:
    backend = opener()
    session = backend._session
    assert session is not None
    assert session.store is not None
    with session.store.env.begin(db=session.store.trees.notes, write=True) as txn:
        txn.put(b"format", (3).to_bytes(8, "little"))
    backend.close()
    with pytest.raises(BackendUnavailableError, match="store format 3"):
        opener()


def test_registration_imports_neither_lmdb_nor_numpy() -> None:
    code = """
import sys
import time
import kvstore_lmdb.hooks as hooks
(plugin,) = hooks.kvstore_register_backends()
assert plugin.name == "lmdb" and plugin.options.__name__ == "LmdbOptions"
assert not {"lmdb", "numpy", "torch"} & set(sys.modules), set(sys.modules)
assert type(plugin.factory()).__name__ == "LmdbBackend"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_trouble_is_logged_once_a_minute(backend: LmdbBackend, caplog: pytest.LogCaptureFixture) -> None:
    session = backend._session
    assert session is not None
    assert session.store is not None
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        session.note_trouble(session.store, lmdb.DiskError("x"), "writing")
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_close_that_fails_does_not_keep_the_directory(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    close = Environment.close

    def fail(self: Environment) -> None:
        close(self)
        raise OSError(errno.EIO, "closing failed")

    with monkeypatch.context() as patch:
        patch.setattr(Environment, "close", fail)
        started = time.monotonic()
        backend.close()
        assert time.monotonic() - started < 2

    again = opener()
    assert put(again, item_of(1)) == [PutStatus.STORED]

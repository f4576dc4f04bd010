"""A23: no name that anybody chooses leads out of the store, nor does a link; and nobody else may read it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import KVCacheKey, Namespace
from kvstore.errors import BackendError
from kvstore.types import Presence
from tests.faults.conftest import Rounds
from tests.faults.media import LmdbStore, S3Store, server_of
from tests.faults.process import Forge
from tests.faults.store import TIER, Store, over
from tests.support_faults import NAMESPACE, SMALL, noise, same, unrelated

NASTY = [
    "../../x", "/etc/x", "a/../b", "a\\..\\b", ".", "..", "~", "~root", "$HOME", "%2e%2e%2f", "x\0y", "x\ny", "x\r\ny",
    "x" * 4096, "\N{GRINNING FACE}", "\N{COMBINING ACUTE ACCENT}", "CON", "NUL", "con.txt", "-rf", " ", "x ", "a:b",
    "data.mdb", "index", "epochs", "namespaces", "seg-0000", "\N{RIGHT-TO-LEFT OVERRIDE}txt", "*?[a]",
]  # fmt: skip
S3_KEY = re.compile(r"[A-Za-z0-9/_.=-]{1,512}")
OUTSIDE = b"nobody may read or change this"


@dataclasses.dataclass(frozen=True)
class Identity:
    """One way in which a text chosen by somebody enters a name."""

    namespace: Namespace
    key: KVCacheKey


def identities(text: str) -> list[Identity]:
    tokens = [*range(SMALL.block_tokens)]

    def key(**more: Any) -> KVCacheKey:
        return KVCacheKey.from_tokens(tokens, block_tokens=SMALL.block_tokens, **more)

    def hashed(block_hash: Any) -> KVCacheKey:
        return KVCacheKey.from_block_hashes([block_hash], block_tokens=SMALL.block_tokens, chained=True)

    return [
        Identity(Namespace(model=text, revision="r"), key()),
        Identity(Namespace(model="m", revision=text), key()),
        Identity(dataclasses.replace(NAMESPACE, engine_layout=text, kv_scales=text), key()),
        Identity(NAMESPACE, key(salt=text)),
        Identity(NAMESPACE, key(adapter=text)),
        Identity(NAMESPACE, hashed(text)),
        Identity(NAMESPACE, hashed(text.encode())),
    ]


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@over("LNTS")
def test_any_text_is_an_identity_of_its_own_and_stays_inside(store: Store, rounds: Rounds) -> None:
    home = store.root.parent
    before = everything_below(home)
    texts = NASTY if store.kind == "lmdb" else NASTY[: rounds(8, len(NASTY))]
    everyone = [identity for text in texts for identity in identities(text)]
    groups: dict[Namespace, list[tuple[int, Identity]]] = {}
    for i, identity in enumerate(everyone):
        groups.setdefault(identity.namespace, []).append((i, identity))
    for namespace, members in groups.items():
        with store.open(namespace=namespace) as cache:
            for i, identity in members:
                assert cache.contains_each(identity.key) == [Presence.ABSENT], i  # nobody's, though others are there
                cache.put(identity.key, noise(SMALL, [i]))
            cache.flush(60)
    for namespace, members in groups.items():
        with store.open(namespace=namespace) as cache:
            for i, identity in members:
                found = cache.fetch(identity.key)
                assert found is not None, i
                assert same(found, noise(SMALL, [i])), i
    assert {name.split("/")[0] for name in everything_below(home) - before} <= {store.root.name}
    assert store.strangers() == []
    assert_plain_names(store)


def assert_plain_names(store: Store) -> None:
    if isinstance(store, S3Store):
        keys = [key for bucket in server_of(store).buckets.values() for key in bucket]
        assert [key for key in keys if not S3_KEY.fullmatch(key)] == []
        assert [key for key in keys if not key.startswith(f"{S3Store.PREFIX}/")] == []
    elif isinstance(store, LmdbStore):
        assert max(len(place) for place in store.places()) <= 511
    names = everything_below(store.root) if store.root.exists() else set()
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9/_.=-]+", name) or ".." in name] == []


# -- links


def files_of(store: Store) -> list[Path]:
    return sorted(path for path in store.root.rglob("*") if path.is_file() and not path.is_symlink())


def filled(store: Store) -> None:
    with store.open() as cache:
        for i in range(4):
            cache.store(unrelated(i), noise(SMALL, [i]))


def use(store: Store) -> str:
    """Open and use a store; returns what was said at open, and lets nothing wrong pass."""
    try:
        cache = store.open()
    except BackendError as e:
        return str(e)
    with cache:
        for i in range(6):
            found = cache.fetch(unrelated(i))
            assert found is None or same(found, noise(SMALL, [i]))
            cache.store(unrelated(i), noise(SMALL, [i]))
            found = cache.fetch(unrelated(i))
            refused = cache.tier(TIER).counters.refused_medium
            assert found is not None or refused, i
            assert found is None or same(found, noise(SMALL, [i]))
        cache.clear()
    return ""


@over("LNT")
def test_a_link_in_place_of_a_file_is_not_followed(store: Store, tmp_path: Path) -> None:
    filled(store)
    names = [path.relative_to(store.root) for path in files_of(store)]
    assert names
    for n, name in enumerate(names):
        target = tmp_path / f"outside-{n}"
        target.write_bytes(OUTSIDE)
        mode = target.stat().st_mode
        path = store.root / name
        kept = path.read_bytes() if path.is_file() else b""
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
        told = use(store)
        assert target.read_bytes() == OUTSIDE, name
        assert target.stat().st_mode == mode, name
        assert str(name.name) in told or str(store.root) in told or not told, told
        if path.is_symlink():
            path.unlink()
            path.write_bytes(kept)
        assert use(store) == "", name  # without the link all is well again


@over("T")
def test_a_link_in_place_of_a_folder_is_not_followed(store: Store, tmp_path: Path) -> None:
    filled(store)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(OUTSIDE)
    for place in store.places():
        folder = store.root / Path(place).parts[0]
        if folder.is_symlink():
            continue
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        folder.symlink_to(outside, target_is_directory=True)
    use(store)
    use(store)
    assert everything_below(outside) == {"kept"}
    assert (outside / "kept").read_bytes() == OUTSIDE


@over("LNT")
def test_the_directory_itself_may_be_a_link_of_its_owner(store: Store, tmp_path: Path) -> None:
    """Operators put stores on other disks by a link; what matters is who owns where it leads."""
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    store.root.symlink_to(real, target_is_directory=True)
    assert use(store) == ""
    assert files_of(type(store)(real))


# -- who may look


@over("LNT")
def test_files_are_for_the_owner_alone_whatever_the_umask(store: Store) -> None:
    before = os.umask(0)
    try:
        filled(store)
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in store.root.rglob("*")}
    wrong = {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}
    assert wrong == {}
    assert modes


@over("LNT")
def test_a_directory_that_others_may_write_is_told_at_open(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.root.mkdir()
    store.root.chmod(0o777)
    told = use(store) + caplog.text
    assert str(store.root) in told
    assert "777" in told or "writable" in told or "others" in told, told
    store.root.chmod(0o700)
    caplog.clear()
    assert use(store) + caplog.text == ""


@pytest.fixture
def shared_home() -> Iterator[Path]:
    """A folder that every user gets through to."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


FOREIGN = """
import logging
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("kvstore").addHandler(Lines(logging.WARNING))
os.setgid(65534); os.setuid(65534)
try:
    cache = STORE.open()
except Exception as e:
    told = f"{type(e).__name__}: {e}"
else:
    told = ""
    cache.close()
print(json.dumps([told, lines]))
"""


@over("LNT")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_directory_of_somebody_else_is_told_at_open(store: Store, forge: Forge, shared_home: Path) -> None:
    theirs = type(store)(shared_home / "store")
    filled(theirs)
    theirs.root.chmod(0o777)
    told, lines = forge.work(FOREIGN, theirs)
    assert str(theirs.root) in told + json.dumps(lines)
    theirs.close()

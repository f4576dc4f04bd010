"""A17: every process, however it is started, makes the same names; another scheme is never a silent miss."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockSpec, KVCacheKey
from kvstore.keys import KEY_SCHEME_VERSION
from kvstore.types import Presence
from tests.faults.conftest import Rounds
from tests.faults.process import Forge, prepared, run
from tests.faults.store import LETTERS, Store, load, over
from tests.support_faults import NAMESPACE, SMALL, noise, same, target, unrelated

CHAINS = 50
PUT = f"""
with STORE.open() as cache:
    for seed in range({CHAINS}):
        key = chain(2, seed=seed)
        cache.put(key, noise(SMALL, [2 * seed, 2 * seed + 1]))
    cache.flush(60)
"""
GET = f"""
digests, hits = [], 0
with STORE.open() as cache:
    for seed in range({CHAINS}):
        key = chain(2, seed=seed)
        out = target(SMALL, 2)
        hits += cache.get(key, out) == 2 and same(out, noise(SMALL, [2 * seed, 2 * seed + 1]))
        digests += [digest.hex() for digest in key]
print(json.dumps(dict(hits=hits, digests=digests)))
"""
WAYS: list[dict[str, Any]] = [
    {"env": {"PYTHONHASHSEED": "0"}, "flags": ("-O",)},
    {"env": {"PYTHONHASHSEED": "random", "LC_ALL": "C", "TZ": "Asia/Kathmandu"}, "cwd": Path("/")},
    {"env": {"PYTHONHASHSEED": "1", "LANG": "tr_TR.UTF-8"}},
    {"env": {"PYTHONHASHSEED": "random"}, "flags": ("-OO", "-W", "error")},
]


def keys_seen(report: dict[str, Any]) -> list[str]:
    assert report["hits"] == CHAINS
    return list(report["digests"])


@over("LNTS")
def test_every_kind_of_process_finds_what_the_first_one_put(store: Store, forge: Forge, rounds: Rounds) -> None:
    forge.work(PUT, store)
    first = list(LETTERS.values()).index(store.kind)  # each way with one medium at least
    ways = WAYS[first : first + rounds(1, len(WAYS))] + WAYS[: rounds(0, first)]
    seen = [keys_seen(run(GET, store, **how)) for how in ways]
    seen.append(keys_seen(forge.work(GET, store)))  # forked from a process that had imported everything
    assert all(digests == seen[0] for digests in seen)
    assert len(set(seen[0])) == 2 * CHAINS
    assert store.find(bytes.fromhex(seen[0][1])) is not None


def _hits(text: str, code: str, results: Any) -> None:
    import io
    import sys
    from contextlib import redirect_stdout

    sys.argv = ["", text]
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(code, "<child>", "exec"), {"__name__": "child"})  # noqa: S102 - the test's own text
    results.put(said.getvalue())


@over("L")
def test_spawned_and_forked_children_agree_while_the_parent_uses_the_store(store: Store, forge: Forge) -> None:
    forge.work(PUT, store)
    with store.open() as cache:
        assert cache.get(chain0(), target(SMALL, 2)) == 2
        said = []
        for method in ("spawn", "forkserver"):
            context: Any = multiprocessing.get_context(method)
            results = context.SimpleQueue()
            child = context.Process(target=_hits, args=(store.to_json(), prepared(GET), results))
            child.start()
            said.append(json.loads(results.get()))
            child.join(60)
            assert child.exitcode == 0
            results.close()
        assert keys_seen(said[0]) == keys_seen(said[1])
        assert cache.get(chain0(), target(SMALL, 2)) == 2


def chain0() -> KVCacheKey:
    from tests.support_faults import chain

    return chain(2, seed=0)


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "key_vectors.json").read_text("ascii"))


@over("LNTS")
def test_stored_names_are_those_of_the_golden_vectors(store: Store) -> None:
    found = 0
    for case in VECTORS["keys"]:
        if set(case) != {"tokens", "block_tokens", "digests"} or not case["digests"]:
            continue
        spec = BlockSpec(layers=2, kv_heads=2, head_dim=64, block_tokens=case["block_tokens"], dtype="bfloat16")
        key = KVCacheKey.from_tokens(case["tokens"], block_tokens=case["block_tokens"])
        with store.open(spec=spec) as cache:
            for i in range(len(key)):  # one by one, so that each is an object of its own
                cache.store(key[i : i + 1], noise(spec, [i]))
        for digest in case["digests"]:
            assert store.find(bytes.fromhex(digest)) is not None, case
            found += 1
    assert found >= 8


@over("LNTS")
def test_another_key_scheme_is_a_namespace_of_its_own_and_says_so(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with store.open() as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
    other = dataclasses.replace(NAMESPACE, key_scheme=KEY_SCHEME_VERSION + 1)
    assert "key scheme" not in caplog.text
    with store.open(namespace=other) as cache:
        assert f"key scheme {KEY_SCHEME_VERSION + 1}" in caplog.text
        assert cache.contains_each(unrelated(0)) == [Presence.ABSENT]
        assert cache.fetch(unrelated(0)) is None
    with store.open() as cache:
        found = cache.fetch(unrelated(0))
        assert found is not None
        assert same(found, noise(SMALL, [0]))


@pytest.mark.parametrize("damage", ["newer", "noise"])
@over("L")
def test_a_store_of_another_format_is_an_error_or_cold_with_a_warning(
    store: Store, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvstore.errors import BackendError

    with store.open() as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
    change_format(store, damage)
    found, told = None, ""
    try:
        with store.open() as cache:
            found = cache.fetch(unrelated(0))
    except BackendError as e:
        told = str(e)
    assert found is not None or "format" in told + caplog.text


def change_format(store: Store, damage: str) -> None:
    """Make the database say that a newer version wrote it."""
    import lmdb

    with lmdb.open(str(store.root), max_dbs=8, map_size=32 << 30) as env, env.begin(write=True) as txn:
        notes = env.open_db(b"notes", txn=txn, create=False)
        names = [bytes(k) for k, _ in txn.cursor(db=notes) if b"format" in bytes(k)]
        assert names
        for name in names:
            txn.put(
                name, b"\x63" * len(bytes(txn.get(name, db=notes) or b"")) if damage == "noise" else b"99", db=notes
            )


def test_this_file_reads_stores_that_other_processes_describe(tmp_path: Path) -> None:
    from tests.faults.media import LmdbStore

    assert load(LmdbStore(tmp_path).to_json()).root == tmp_path

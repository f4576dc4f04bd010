"""Each difference from AIBrix, shown on both sides, and why theirs is wrong; see ``differences``."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.errors import ClosedError
from tests.engines.aibrix.differences import DIFFERENCES
from tests.engines.aibrix.pair import KINDS, MakePair, Pair, Side, block_bytes, raw

pytest.importorskip("aibrix_kvcache", reason="aibrix-kvcache is not installed: make test-engines")
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

HASHES = [f"h{i}" for i in range(8)]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "coming-from-aibrix.md"


@pytest.fixture
def memory(make_pair: MakePair) -> Pair:
    return make_pair()


@pytest.fixture
def tiered(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    """Opens a pair with a second tier: RocksDB or files, and LMDB or files on our side."""

    def make(backend: str = "ROCKSDB", threshold: str = "1,0", **spec: Any) -> Pair:
        for name, value in {"L2_CACHE_BACKEND": backend, "DOUBLE_GET_THRESHOLD": threshold}.items():
            monkeypatch.setenv(f"AIBRIX_KV_CACHE_OL_{name}", value)
        return make_pair(**spec)

    return make


def tokens(side: Side, n_tokens: int = 32) -> Any:
    return side.ids("tokens", range(n_tokens))


def hashes(side: Side, *values: str) -> Any:
    return side.ids("hashes", values or HASHES)


def read(side: Side, prefix: Any, query: Any, n_blocks: int) -> tuple[Any, list[bytes]]:
    """Status and bytes of a ``get`` into memory of ones."""
    room = torch.full((n_blocks, *side.cache.block_shape), -1, dtype=side.cache.block_dtype)
    blocks = [room[i : i + 1] for i in range(n_blocks)]
    handle = side.package.MemoryRegionKVCacheHandle.create(
        blocks, side.cache.block_spec, [(i, 0) for i in range(n_blocks)]
    )
    return side.cache.get(prefix, query, handle), [raw(block) for block in room]


def untouched(side: Side) -> bytes:
    return raw(torch.full(side.cache.block_shape, -1, dtype=side.cache.block_dtype))


def restarted(pair: Pair) -> Pair:
    for side in pair.sides:
        side.reopen()
        side.kept.clear()
    return pair


def test_hashes_equal_by_the_last(memory: Pair) -> None:
    def equal(side: Side) -> bool:
        return bool(hashes(side, "p1", "p2", "x") == hashes(side, "q1", "q2", "x"))

    assert (equal(memory.theirs), equal(memory.ours)) == (True, False)


def test_content_hashes_ignore_their_prefix(make_pair: MakePair) -> None:
    pair = make_pair(meaning="content")

    def found(side: Side) -> list[bytes]:
        side.put(None, hashes(side, "p", "x"), ["p", "x after p"])
        other = hashes(side, "q", "x")
        return side.found(other[:4], other[4:])

    assert found(pair.theirs) == pair.theirs.named("x after p")
    assert found(pair.ours) == []


def test_a_key_forgets_where_it_was_cut(memory: Pair) -> None:
    def equal(side: Side) -> bool:
        whole, key = tokens(side), side.package.KVCacheKey
        return bool(key(whole[:4], whole[4:]) == key(whole[:8], whole[8:]))

    assert (equal(memory.theirs), equal(memory.ours)) == (True, False)


def test_keys_follow_the_callers_list(memory: Pair) -> None:
    def found(side: Side) -> list[bytes]:
        reused = ["first"]
        query = side.package.BlockHashes(reused, 4)
        side.put(None, query, ["kv of first"])
        reused[0] = "second"
        return side.found(None, query)

    assert found(memory.theirs) == []  # the very object no longer finds what was put with it
    assert found(memory.ours) == memory.ours.named("kv of first")


def test_prefix_of_another_object(memory: Pair) -> None:
    def call(side: Side) -> Any:
        view = side.package.TokenListView
        return side.cache.exists(view([0, 1, 2, 3]), view([4, 5, 6, 7]))

    for side in memory.sides:
        side.put(None, tokens(side, 8), ["a", "b"])
    with pytest.raises(ValueError, match="different underlying data"):
        call(memory.theirs)
    assert call(memory.ours).value == 4


def test_joined_backwards(memory: Pair) -> None:
    def joined(side: Side) -> list[int]:
        whole = tokens(side, 8)
        return [int(token) for token in whole[4:] + whole[:4]]

    assert joined(memory.theirs) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert joined(memory.ours) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_arguments_dropped(memory: Pair) -> None:
    for side in memory.sides:
        side.put(None, tokens(side), range(8))
    theirs, ours = memory.theirs, memory.ours
    assert theirs.cache.exists(None, tokens(theirs), timeout_s=3, query=None).value == 32
    for kwargs in ({"timeout_s": 3}, {"query": None}, {"kv_tensors": None}):
        with pytest.raises(TypeError, match="each once"):
            ours.cache.exists(None, tokens(ours), **kwargs)


def test_a_suffix_is_found_as_the_head(tiered: Callable[..., Pair]) -> None:
    pair = tiered()
    for side in pair.sides:
        side.put(None, tokens(side)[:8], ["head 0", "head 1"])
    restarted(pair)

    def found(side: Side) -> list[bytes]:
        return side.found(None, tokens(side)[16:24])

    assert found(pair.theirs) == pair.theirs.named("head 0", "head 1")
    assert found(pair.ours) == []


@pytest.mark.parametrize("kind", KINDS)
def test_get_reports_what_it_did_not_copy(tiered: Callable[..., Pair], kind: str) -> None:
    pair = tiered()

    def call(side: Side) -> tuple[Any, list[bytes]]:
        query = tokens(side) if kind == "tokens" else hashes(side)
        side.put(None, query[:8], ["a", "b"])
        return read(side, None, query, 8)

    status, blocks = call(pair.theirs)
    assert (status.value, blocks[:2]) == (8, [untouched(pair.theirs)] * 2)
    status, blocks = call(pair.ours)
    assert (status.value, blocks[:2]) == (8, pair.ours.named("a", "b"))


def test_a_hole_is_counted_as_a_hit(tiered: Callable[..., Pair]) -> None:
    pair = tiered("SHFS")
    for side in pair.sides:
        side.put(tokens(side)[:4], tokens(side)[4:8], ["second"])
    restarted(pair)

    def call(side: Side) -> Any:
        return side.cache.acquire(None, tokens(side)[:8])

    status = call(pair.theirs)
    assert status.value[0] == 4  # of block 0, which was never stored
    assert call(pair.ours).is_not_found()


def test_get_writes_behind_what_it_reports(tiered: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED", "0")
    pair = tiered()

    def call(side: Side) -> tuple[Any, list[bytes]]:
        side.put(tokens(side)[:4], tokens(side)[4:8], ["second"])
        side.cache.flush()
        return read(side, None, tokens(side)[:8], 2)

    status, blocks = call(pair.theirs)
    assert (status.is_not_found(), blocks) == (True, [untouched(pair.theirs), *pair.theirs.named("second")])
    status, blocks = call(pair.ours)
    assert (status.is_not_found(), blocks) == (True, [untouched(pair.ours)] * 2)


def test_more_room_than_the_query(tiered: Callable[..., Pair]) -> None:
    pair = tiered()
    for side in pair.sides:
        side.put(None, tokens(side)[:8], ["a", "b"])
    restarted(pair)
    assert read(pair.theirs, None, tokens(pair.theirs)[:8], 3)[0].is_error()
    status, blocks = read(pair.ours, None, tokens(pair.ours)[:8], 3)
    assert (status.value, blocks) == (8, [*pair.ours.named("a", "b"), untouched(pair.ours)])


def test_short_queries_skip_the_second_tier(tiered: Callable[..., Pair]) -> None:
    pair = tiered(threshold="4,0.1")  # the default
    for side in pair.sides:
        side.put(None, tokens(side)[:12], ["a", "b", "c"])
    restarted(pair)
    assert pair.theirs.cache.exists(None, tokens(pair.theirs)[:12]).is_not_found()
    assert pair.theirs.cache.exists(None, tokens(pair.theirs)).value == 12
    assert pair.ours.cache.exists(None, tokens(pair.ours)[:12]).value == 12


def test_get_keeps_references(memory: Pair) -> None:
    def call(side: Side) -> Any:
        side.put(None, tokens(side)[:8], ["a", "b"])
        for _ in range(5):
            assert read(side, None, tokens(side)[:8], 2)[0].value == 8
        handle = side.cache.acquire(None, tokens(side)[:8]).value[1]
        counts = [region.ref_count for region in handle.memory_regions]
        handle.release()
        return counts

    assert call(memory.theirs) == [7, 7]  # its own, this handle's, and five that nobody has
    assert call(memory.ours) == [1, 1]
    l1 = memory.ours.cache._store.stats().l1
    assert l1 is not None
    assert l1.pinned_blocks == 0


def test_a_second_release_frees_a_cached_block(memory: Pair) -> None:
    def released_twice(side: Side) -> list[bytes]:
        side.put(None, tokens(side)[:4], ["a"])
        handle = side.cache.acquire(None, tokens(side)[:4]).value[1]
        handle.release()
        if side is memory.ours:
            with pytest.raises(ValueError, match="no reference left"):
                handle.release()
        else:
            handle.release()
        if side is memory.theirs:
            side.cache._allocator._free_pool.clear()  # memory that was never used has run out
        side.put(None, side.ids("tokens", range(100, 104)), ["b"])
        return side.found(None, tokens(side)[:4])

    assert released_twice(memory.theirs) == memory.theirs.named("b")
    assert released_twice(memory.ours) == memory.ours.named("a")


def test_tiers_disagree_after_a_second_put(tiered: Callable[..., Pair]) -> None:
    pair = tiered()

    def call(side: Side) -> tuple[list[bytes], list[bytes]]:
        for label in ("first", "second"):
            side.put(None, tokens(side)[:4], [label])
        before = side.found(None, tokens(side)[:4])
        side.reopen()
        return before, side.found(None, tokens(side)[:4])

    first, second = pair.theirs.named("first", "second")
    assert call(pair.theirs) == ([second], [first])
    assert call(pair.ours) == ([first], [first])  # the key names one content, in every tier


def test_another_dtype_reads_the_same_bytes(tiered: Callable[..., Pair]) -> None:
    pair = tiered(dtype=torch.bfloat16)
    for side in pair.sides:
        side.put(None, tokens(side)[:4], ["a"])
        side.options["dtype"] = torch.float16
    restarted(pair)
    assert pair.theirs.found(None, tokens(pair.theirs)[:4]) == pair.theirs.named("a")
    assert pair.ours.found(None, tokens(pair.ours)[:4]) == []


def test_other_layers_read_the_same_bytes(tiered: Callable[..., Pair]) -> None:
    pair = tiered(layers=[0, 1, 4])
    for side in pair.sides:
        side.put(None, tokens(side)[:4], ["a"])
        side.options["layers"] = [0, 3, 4]
    restarted(pair)
    assert pair.theirs.found(None, tokens(pair.theirs)[:4]) == pair.theirs.named("a")
    assert pair.ours.found(None, tokens(pair.ours)[:4]) == []


def test_hashes_run_together(tiered: Callable[..., Pair]) -> None:
    pair = tiered(block_ntokens=8, hash_ntokens=4)
    for side in pair.sides:
        side.put(None, hashes(side, "ab", "c"), ["ab c"])
    restarted(pair)
    assert pair.theirs.found(None, hashes(pair.theirs, "a", "bc")) == pair.theirs.named("ab c")
    assert pair.ours.found(None, hashes(pair.ours, "a", "bc")) == []


def test_damage_is_delivered(tiered: Callable[..., Pair], tmp_path: Path) -> None:
    pair = tiered("SHFS")
    for side in pair.sides:
        side.put(None, tokens(side)[:4], ["a"])
        side.cache.flush()
        side.close()
    block = block_bytes("a", 512).numpy().tobytes()
    hit = 0
    for file in (file for file in (tmp_path / "shfs").rglob("*") if file.is_file()):
        data = file.read_bytes()
        if (at := data.find(block)) >= 0:
            file.write_bytes(data[: at + 100] + bytes([data[at + 100] ^ 1]) + data[at + 101 :])
            hit += 1
    assert hit == 2  # one of each
    for side in pair.sides:
        side.open()
    delivered = pair.theirs.found(None, tokens(pair.theirs)[:4])
    assert delivered != pair.theirs.named("a")
    assert len(delivered) == 1
    assert pair.ours.found(None, tokens(pair.ours)[:4]) == []


def test_evicted_keys_are_kept(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB", str(64 * 1024 / 2**30))
    pair = make_pair()
    for side in pair.sides:
        for i in range(300):
            side.put(None, side.ids("tokens", range(4 * i, 4 * i + 4), fresh=True), [i])
    policy = pair.theirs.cache._l1_cache._eviction_policy
    held = sum(node.value is not None for node in policy._hashmap.values())
    assert len(policy._hashmap) == 300 > held
    assert len(pair.ours.cache._store._state.stack.l1._index.entries) <= pair.ours.cache._l1_blocks < 300


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_chunk_is_not_announced(memory: Pair, kind: str) -> None:
    def announced(side: Side) -> list[int | None]:
        query = tokens(side, 4 * 384) if kind == "tokens" else hashes(side, *(f"h{i}" for i in range(384)))
        return [None if later is None else len(later) for _, _, later, _ in side.cache.cache_chunk_keys(None, query)]

    assert announced(memory.theirs) == [512, None, None]
    assert announced(memory.ours) == [512, 512, None]


def test_get_is_counted_in_blocks_of_blocks(memory: Pair) -> None:
    def hits(side: Side) -> int:
        side.put(None, tokens(side)[:8], ["a", "b"])
        read(side, None, tokens(side)[:8], 2)
        return int(side.cache.metrics.mgr.num_tokens_hit)

    assert (hits(memory.theirs), hits(memory.ours)) == (32, 8)


def test_calls_are_remembered_for_ever(memory: Pair) -> None:
    def kept(side: Side) -> int:
        for _ in range(5000):
            side.cache.exists(None, tokens(side)[:4])
        return len(side.cache.metrics.mgr.exists_metrics.num_tokens)

    assert kept(memory.theirs) == 5000
    assert kept(memory.ours) == 4096


def test_closing_twice(memory: Pair) -> None:
    theirs, ours = memory.theirs, memory.ours
    for side in memory.sides:
        side.cache.close()
    with pytest.raises(AttributeError):
        theirs.cache.close()
    theirs.cache = None
    ours.cache.close()
    with pytest.raises(ClosedError):
        ours.cache.exists(None, tokens(ours))


def test_reserving_what_put_refuses(memory: Pair) -> None:
    def call(side: Side) -> Any:
        return side.cache.allocate_for(tokens(side)[:3], tokens(side)[3:11])

    status = call(memory.theirs)
    assert status.is_ok()
    assert memory.theirs.cache.put(tokens(memory.theirs)[:3], tokens(memory.theirs)[3:11], status.value).is_invalid()
    assert call(memory.ours).is_invalid()


def test_every_difference_has_its_test_and_stands_in_the_docs() -> None:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    tests = {node.name.removeprefix("test_") for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in DIFFERENCES if name not in tests]
    assert not missing
    told = {name for name in tests if name in DIFFERENCES}
    others = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert others == {f"test_{name}" for name in told} | {"test_every_difference_has_its_test_and_stands_in_the_docs"}
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in DIFFERENCES if f"`{name}`" not in page] == []

"""What is stored comes back, by either kind of key, by prefix and query, as far as it goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.compat import aibrix
from tests.unit.compat.rig import BLOCK_TOKENS, KINDS, MakeCache, config_of, fill, ids_of, own_memory, store, values

Cache = aibrix.BaseKVCacheManager
pytestmark = pytest.mark.parametrize("kind", KINDS)


def test_what_is_put_is_acquired_and_got(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 5)
    store(cache, None, query)
    assert cache.exists(None, query) == aibrix.Status.ok(20)
    n_tokens, handle = cache.acquire(None, query).get()
    assert (n_tokens, len(handle), values(handle.to_tensors())) == (20, 5, [0, 1, 2, 3, 4])
    assert {t.shape for t in handle.to_tensors()} == {cache.block_shape}
    handle.release()
    memory, own = own_memory(cache, 5)
    assert cache.get(None, query, own) == aibrix.Status.ok(20)
    assert values(list(memory)) == [0, 1, 2, 3, 4]


def test_nothing_stored_is_not_found(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 3)
    memory, own = own_memory(cache, 3)
    for status in (cache.exists(None, query), cache.acquire(None, query), cache.get(None, query, own)):
        assert status.is_not_found()
        assert status.value is None
    assert values(list(memory)) == [-1, -1, -1]


def test_a_partial_hit_gives_the_leading_blocks_and_touches_nothing_behind(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 6)
    store(cache, None, query[: 2 * BLOCK_TOKENS], first=1)
    assert cache.exists(None, query).value == 8
    n_tokens, handle = cache.acquire(None, query).get()
    assert (n_tokens, values(handle.to_tensors())) == (8, [1, 2])
    handle.release()
    memory, own = own_memory(cache, 6)
    assert cache.get(None, query, own).value == 8
    assert values(list(memory)) == [1, 2, -1, -1, -1, -1]


def test_a_hole_ends_the_prefix_and_the_blocks_behind_it_are_found_with_their_prefix(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 4)
    store(cache, None, query)
    assert cache.delete(
        None, query[BLOCK_TOKENS : 2 * BLOCK_TOKENS] if kind == "hashes" else query[:BLOCK_TOKENS]
    ).is_ok()
    assert cache.exists(None, query).value == (4 if kind == "hashes" else None)
    assert cache.exists(query[: 2 * BLOCK_TOKENS], query[2 * BLOCK_TOKENS :]).value == 8


def test_prefix_and_query_cut_anywhere_name_the_same_blocks(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 6)
    store(cache, query[:8], query[8:], first=2)
    for n_before in range(2, 6):
        prefix, rest = query[: n_before * BLOCK_TOKENS], query[n_before * BLOCK_TOKENS :]
        handle = cache.acquire(prefix, rest).get()[1]
        assert values(handle.to_tensors()) == list(range(n_before, 6))
        handle.release()


def test_a_prefix_from_another_object_is_the_same_prefix(cache: Cache, kind: str) -> None:
    query, again = ids_of(kind, 6), ids_of(kind, 6)
    store(cache, None, query)
    assert cache.exists(again[:8], query[8:]).value == 16
    assert cache.exists(again[:0], query).value == 24


def test_another_prompt_is_not_found(cache: Cache, kind: str) -> None:
    store(cache, None, ids_of(kind, 4))
    assert cache.exists(None, ids_of(kind, 4, seed=1)).is_not_found()


def test_get_fills_as_many_blocks_as_the_handle_has(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 5)
    store(cache, None, query)
    memory, own = own_memory(cache, 2)
    assert cache.get(None, query, own).value == 8
    assert values(list(memory)) == [0, 1]
    memory, own = own_memory(cache, 8)
    assert cache.get(None, query, own).value == 20
    assert values(list(memory)) == [0, 1, 2, 3, 4, -1, -1, -1]


def test_a_query_below_one_block_finds_and_reserves_nothing(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 2)[:0] if kind == "hashes" else ids_of(kind, 2)[:3]
    assert cache.exists(None, query).is_not_found()
    assert cache.acquire(None, query).is_not_found()
    assert cache.get(None, query, own_memory(cache, 1)[1]).is_not_found()
    assert cache.allocate_for(None, query).is_invalid()
    assert cache.delete(None, query).is_ok()
    cache.prefetch(None, query)


def test_a_put_of_the_callers_memory_is_a_copy(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 3)
    memory, own = own_memory(cache, 3)
    fill(list(memory), first=7)
    assert cache.put(None, query, own).value == 12
    memory.fill_(99)
    handle = cache.acquire(None, query).get()[1]
    assert values(handle.to_tensors()) == [7, 8, 9]
    handle.release()


def test_a_handle_may_be_put_under_another_key_than_it_was_reserved_for(cache: Cache, kind: str) -> None:
    reserved, query = ids_of(kind, 3, seed=1), ids_of(kind, 3)
    handle = cache.allocate_for(None, reserved).get()
    fill(handle.to_tensors(), first=3)
    assert cache.put(None, query, handle).value == 12
    assert cache.exists(None, reserved).is_not_found()
    handle = cache.acquire(None, query).get()[1]
    assert values(handle.to_tensors()) == [3, 4, 5]
    handle.release()


def test_a_put_that_does_not_fit_its_query_is_invalid_and_takes_the_handle(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 4)
    handle = cache.allocate_for(None, query).get()
    assert cache.put(None, query[:8], handle).is_invalid()
    assert [region.ref_count for region in handle.memory_regions] == [0] * 4
    assert cache.exists(None, query).is_not_found()


def test_a_prefix_of_broken_blocks_is_invalid(cache: Cache, kind: str) -> None:
    if kind == "hashes":
        query = aibrix.BlockHashes(["a", "b", "c"], 2)
        prefix, query = query[:2], query[2:]
    else:
        query = ids_of(kind, 3)
        prefix, query = query[:3], query[3:11]
    handle = cache.allocate_for(None, ids_of(kind, 2, seed=9)).get()
    assert cache.exists(prefix, query).is_invalid()
    assert cache.acquire(prefix, query).is_invalid()
    assert cache.get(prefix, query, own_memory(cache, 1)[1]).is_invalid()
    assert cache.put(prefix, query, handle).is_invalid()
    assert cache.delete(prefix, query).is_invalid()


def test_blocks_outlive_the_cache_in_its_tiers(make_cache: MakeCache, tmp_path: Path, kind: str) -> None:
    config: Any = {"l2": [{"backend": "lmdb", "path": str(tmp_path), "capacity": "16MiB", "admit": "all"}]}
    first, query = make_cache(config), ids_of(kind, 5)
    store(first, None, query, first=2)
    assert first.flush().is_ok()
    first.close()
    second = make_cache(config)
    assert second.exists(None, ids_of(kind, 5)).value == 20
    handle = second.acquire(query[:8], query[8:]).get()[1]
    assert values(handle.to_tensors()) == [4, 5, 6]
    handle.release()


def test_a_cache_without_l1_keeps_everything_in_its_tiers(make_cache: MakeCache, kind: str) -> None:
    cache, query = make_cache({"l2": [{"backend": "memory"}]}, l1=None), ids_of(kind, 4)
    store(cache, None, query[:12])
    assert cache.flush().is_ok()
    assert cache.exists(None, query).value == 12
    n_tokens, handle = cache.acquire(None, query).get()
    assert (n_tokens, values(handle.to_tensors())) == (12, [0, 1, 2])
    handle.release()
    assert cache.delete(None, query).is_ok()
    assert cache.acquire(None, query).is_not_found()


def test_prefetch_brings_blocks_into_l1(make_cache: MakeCache, tmp_path: Path, kind: str) -> None:
    config: Any = {"l2": [{"backend": "lmdb", "path": str(tmp_path), "capacity": "16MiB", "admit": "all"}]}
    first, query = make_cache(config), ids_of(kind, 3)
    store(first, None, query)
    first.close()
    second = make_cache(config)
    second.prefetch(None, query)
    deadline = time.monotonic() + 10
    while resident_blocks(second) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert resident_blocks(second) == 3


def resident_blocks(cache: Cache) -> int:
    l1 = cache._store.stats().l1
    assert l1 is not None
    return l1.resident_blocks


@pytest.mark.parametrize("layout", ["NCLD", "LCND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_both_layouts_and_every_dtype_round_trip(
    make_cache: MakeCache, kind: str, layout: str, dtype: torch.dtype
) -> None:
    cache, query = make_cache(layout=layout, dtype=dtype), ids_of(kind, 2)
    handle = cache.allocate_for(None, query).get()
    given = torch.randint(0, 256, (2, cache.block_nbytes), dtype=torch.uint8)
    for tensor, raw in zip(handle.to_tensors(), given, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, cache.block_spec.block_shape)
        tensor.view(torch.uint8).flatten().copy_(raw)
    assert cache.put(None, query, handle).is_ok()
    handle = cache.acquire(None, query).get()[1]
    assert [region.tobytes() for region in handle.memory_regions] == [bytes(raw.tolist()) for raw in given]
    handle.release()


def test_cache_blocks_may_be_several_engine_blocks(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_BLOCK_SIZE", "8")
    cache, query = make_cache(), ids_of(kind, 6)
    assert (cache.block_size, cache.block_spec.engine_block_ntokens) == (8, BLOCK_TOKENS)
    store(cache, None, query)
    assert cache.exists(None, query[:20]).value == 16  # the third block is not whole
    assert cache.exists(query[:8], query[8:]).value == 16
    assert cache.exists(query[:4], query[4:]).is_invalid()


def test_a_sequence_beyond_the_bound_is_cut_or_denied(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_MAX_SEQ_LEN", "10")  # whole blocks: 12
    cache, query = make_cache(), ids_of(kind, 5)
    handle = cache.allocate_for(None, query).get()
    assert cache.put(None, query, handle).value == 12
    assert cache.exists(None, query).value == 12
    assert cache.put(query[:12], query[12:], cache.allocate_for(query[:12], query[12:]).get()).is_denied()


def test_two_tensor_parallel_ranks_share_a_store_and_no_block(make_cache: MakeCache, tmp_path: Path, kind: str) -> None:
    config: Any = {"l2": [{"backend": "lmdb", "path": str(tmp_path), "capacity": "16MiB", "admit": "all"}]}
    query = ids_of(kind, 2)
    first = make_cache(config, heads=[0, 1])
    store(first, None, query)
    first.close()
    assert make_cache(config, heads=[2, 3]).exists(None, query).is_not_found()
    assert make_cache(config, heads=[0, 1]).exists(None, query).value == 8


def test_ids_with_holes_are_another_part_of_the_model(make_cache: MakeCache, tmp_path: Path, kind: str) -> None:
    config: Any = {"l2": [{"backend": "lmdb", "path": str(tmp_path), "capacity": "16MiB", "admit": "all"}]}
    query = ids_of(kind, 2)
    store(make_cache(config, layers=[0, 2, 4]), None, query)
    assert make_cache(config, layers=[0, 3, 4]).exists(None, query).is_not_found()
    assert config_of(layers=[0, 2, 4]).block_spec.block_nbytes == config_of(layers=[0, 3, 4]).block_spec.block_nbytes

"""Handles and references: what is held stays, what is given back is free, and nothing is given back twice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from kvstore.compat import aibrix
from kvstore.compat.aibrix.regions import ManagedMemoryRegion
from kvstore.errors import NotSupportedError
from tests.unit.compat.rig import KINDS, MakeCache, fill, ids_of, own_memory, store, values

Cache = aibrix.BaseKVCacheManager


def pinned(cache: Cache) -> int:
    l1 = cache._store.stats().l1
    assert l1 is not None
    return l1.pinned_blocks


def free_slots(cache: Cache) -> int:
    """Blocks that can be reserved now, on top of what is stored."""
    handle = cache.allocate_for(None, ids_of("tokens", 1000, seed=5)).get()
    handle.release()
    return len(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_pins_its_blocks_until_it_is_released(cache: Cache, kind: str) -> None:
    query = ids_of(kind, 3)
    store(cache, None, query)
    handle = cache.acquire(None, query).get()[1]
    assert pinned(cache) == 3
    assert cache.delete(None, query).is_ok()
    assert values(handle.to_tensors()) == [0, 1, 2]
    handle.release()
    assert pinned(cache) == 0


def test_a_handle_that_is_dropped_gives_its_blocks_back(cache: Cache) -> None:
    query = ids_of("hashes", 3)
    store(cache, None, query)
    handle = cache.acquire(None, query).get()[1]
    tensors = handle.to_tensors()
    del handle, tensors
    gc.collect()
    assert pinned(cache) == 0
    before = free_slots(cache)
    cache.allocate_for(None, ids_of("hashes", 4, seed=1)).get().to_tensors()
    gc.collect()
    assert free_slots(cache) == before


def test_a_second_release_raises_and_takes_nothing(cache: Cache) -> None:
    query = ids_of("hashes", 2)
    store(cache, None, query)
    handle, other = cache.acquire(None, query).get()[1], cache.acquire(None, query).get()[1]
    handle.release()
    with pytest.raises(ValueError, match="no reference left"):
        handle.release()
    assert values(other.to_tensors()) == [0, 1]
    other.release()
    assert cache.exists(None, query).value == 8


def test_what_was_put_is_the_stores(cache: Cache) -> None:
    query = ids_of("hashes", 2)
    handle = cache.allocate_for(None, query).get()
    assert cache.put(None, query, handle).is_ok()
    with pytest.raises(ValueError, match="no reference left"):
        handle.release()
    assert cache.exists(None, query).value == 8


def test_a_truncated_handle_puts_its_first_blocks(cache: Cache) -> None:
    query = ids_of("tokens", 5)
    handle = cache.allocate_for(None, query).get()
    fill(handle.to_tensors())
    regions = list(handle.memory_regions)
    handle.truncate(2)
    assert [region.ref_count for region in regions] == [1, 1, 0, 0, 0]
    assert cache.put(None, query[:8], handle).value == 8
    assert cache.exists(None, query).value == 8


def test_regions_count_references_of_their_own(cache: Cache) -> None:
    query = ids_of("tokens", 2)
    store(cache, None, query)
    handle = cache.acquire(None, query).get()[1]
    region = handle.memory_regions[1]
    assert isinstance(region, ManagedMemoryRegion)
    assert handle.memory_region_type is ManagedMemoryRegion
    region.ref_up()
    handle.release()
    assert pinned(cache) > 0
    assert values([region.to_tensor(cache.block_dtype, cache.block_shape)]) == [1]
    region.ref_down()
    assert pinned(cache) == 0


def test_a_put_leaves_a_block_alone_that_somebody_else_holds(cache: Cache) -> None:
    query = ids_of("tokens", 2)
    handle = cache.allocate_for(None, query).get()
    fill(handle.to_tensors(), first=5)
    kept = handle.memory_regions[0]
    kept.ref_up()
    assert cache.put(None, query, handle).value == 8
    kept.to_tensor(cache.block_dtype, cache.block_shape).fill_(99)
    kept.ref_down()
    stored = cache.acquire(None, query).get()[1]
    assert values(stored.to_tensors()) == [5, 6]
    stored.release()


def test_blocks_of_the_store_are_no_place_to_read_into(cache: Cache) -> None:
    query, other = ids_of("tokens", 2), ids_of("tokens", 2, seed=1)
    store(cache, None, query)
    store(cache, None, other, first=7)
    handle = cache.acquire(None, query).get()[1]
    assert cache.get(None, other, handle).is_invalid()
    assert values(handle.to_tensors()) == [0, 1]
    handle.release()


def test_a_reservation_is_a_place_to_read_into(cache: Cache) -> None:
    query = ids_of("tokens", 2)
    store(cache, None, query, first=3)
    handle = cache.allocate_for(None, ids_of("tokens", 2, seed=1)).get()
    assert cache.get(None, query, handle).value == 8
    assert values(handle.to_tensors()) == [3, 4]
    handle.release()


def test_allocation_is_short_when_l1_is_in_use_and_fails_when_all_of_it_is(make_cache: MakeCache) -> None:
    cache = make_cache(l1="256KiB")
    everything = ids_of("tokens", 1000)
    held = cache.allocate_for(None, everything).get()
    assert 0 < len(held) < 1000
    assert cache.allocate_for(None, ids_of("tokens", 1, seed=1)).is_out_of_memory()
    held.release()
    assert len(cache.allocate_for(None, everything).get()) == len(held)


def test_the_callers_memory_is_told_when_it_is_free(cache: Cache) -> None:
    told = []
    memory = torch.zeros((2, *cache.block_shape), dtype=cache.block_dtype)
    handle = aibrix.MemoryRegionKVCacheHandle.create(
        [memory], cache.block_spec, [(0, 1), (0, 0)], lambda slab, addr, length: told.append((addr, length))
    )
    fill(handle.to_tensors(), first=8)
    assert values(list(memory)) == [9, 8]
    assert handle.memory_region_type is aibrix.ExternalMemoryRegion
    assert cache.put(None, ids_of("tokens", 2), handle).is_ok()
    assert told == [(cache.block_nbytes, cache.block_nbytes), (0, cache.block_nbytes)]


def test_regions_are_bytes_too(cache: Cache) -> None:
    memory, handle = own_memory(cache, 2)
    first, second = handle.memory_regions
    first.fill(bytes(range(256)) * (cache.block_nbytes // 256) + bytes(cache.block_nbytes % 256))
    second.copy(first)
    assert second.tobytes() == first.tobytes()
    assert first.data_ptr() == memory.data_ptr()
    assert (len(first), first.block_nbytes) == (cache.block_nbytes, cache.block_nbytes)
    with pytest.raises(ValueError, match="expected"):
        first.fill(b"x")
    with pytest.raises(ValueError, match="room for 1"):
        aibrix.ExternalMemoryRegion(torch.zeros(1, dtype=torch.uint8), 0, 1).copy(first)


def test_handles_need_regions_of_one_class(cache: Cache) -> None:
    reserved = cache.allocate_for(None, ids_of("tokens", 1)).get()
    mixed = [reserved.memory_regions[0], own_memory(cache, 1)[1].memory_regions[0]]
    for regions in ([], mixed):
        with pytest.raises(ValueError, match="one class"):
            aibrix.MemoryRegionKVCacheHandle(cache.block_dtype, cache.block_shape, regions)
    with pytest.raises(ValueError, match="at least one"):
        aibrix.MemoryRegionKVCacheHandle.create([], cache.block_spec, [])


def test_gpu_direct_handles_are_refused_and_not_announced(cache: Cache) -> None:
    assert (cache.feature.gdr_get, cache.feature.gdr_put) == (False, False)
    make: Any = aibrix.GDRKVCacheHandle
    with pytest.raises(NotSupportedError, match="feature"):
        make(torch.bfloat16, (1,), [])
    with pytest.raises(NotSupportedError, match="feature"):
        aibrix.GDRKVCacheHandle.create([], cache.block_spec, [])
    assert not isinstance(own_memory(cache, 1)[1], aibrix.GDRKVCacheHandle)

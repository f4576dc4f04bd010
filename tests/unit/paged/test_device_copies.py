"""L1's copies on an accelerator: used when they are there, never anything but the block's own bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvstore import BlockSpec, CapacityError, KVCache, KVCacheKey, PagedBlocks
from kvstore.l1.counters import L1Counters
from kvstore.l1.device_cache import DeviceCache
from tests.unit.paged.conftest import LANES, OpenPaged
from tests.unit.paged.pages import key_for, opaque, random_layers

SHAPE = (40, 2, 4, 2, 8)
LAYERS = random_layers(3, SHAPE, torch.bfloat16, 0)
SPEC = opaque(LAYERS)
SLOT_BYTES = -(-SPEC.nbytes // 512) * 512


@pytest.fixture(params=[name for name in LANES if name != "host"])
def lane(request: pytest.FixtureRequest, use_lane: Callable[[str], None]) -> str:
    name: str = request.param
    use_lane(name)
    return name


@pytest.fixture
def cache(lane: str, open_paged: OpenPaged) -> KVCache:
    return open_paged(SPEC, device="cuda:0", device_capacity=20 * SLOT_BYTES)


def l1(cache: KVCache) -> L1Counters:
    counters = cache.stats().l1
    assert counters is not None
    return counters


def near(cache: KVCache) -> DeviceCache:
    state = cache._use().stack.l1
    assert state is not None
    assert state.near is not None
    return state.near


def put(cache: KVCache, key: KVCacheKey, pages: Sequence[int]) -> None:
    assert cache.put(key, PagedBlocks(LAYERS, pages)) == len(key)


def fetch(cache: KVCache, key: KVCacheKey, pages: Sequence[int]) -> int:
    """Get a key into fresh pages; the delivered ones must equal ``pages`` of LAYERS."""
    out = [torch.zeros_like(layer) for layer in LAYERS]
    n_blocks = cache.get(key, PagedBlocks(out, range(len(key))))
    for layer, target in zip(LAYERS, out, strict=True):
        assert torch.equal(layer[list(pages[:n_blocks])].view(torch.uint8), target[:n_blocks].view(torch.uint8))
        assert not target[n_blocks:].view(torch.uint8).any()
    return n_blocks


def test_a_put_is_served_from_the_device(cache: KVCache) -> None:
    key = key_for(SPEC, 6)
    put(cache, key, [5, 1, 2, 9, 8, 0])
    assert l1(cache).device_blocks == 6

    near(cache)._pool.rows().fill_(7)  # what is served now can only come from there
    out = [torch.zeros_like(layer) for layer in LAYERS]
    assert cache.get(key, PagedBlocks(out, range(6))) == 6
    assert all((layer[:6].view(torch.uint8) == 7).all() for layer in out)
    assert l1(cache).device_hits == 6


def test_what_is_delivered_from_host_memory_is_kept(cache: KVCache, lane: str) -> None:
    key, pages = key_for(SPEC, 4), [3, 2, 1, 0]
    blocks = torch.stack([torch.cat([layer[p].view(-1).view(torch.uint8) for layer in LAYERS]) for p in pages])
    with cache.allocate(key) as reserved:
        for tensor, block in zip(reserved.tensors, blocks, strict=True):
            tensor.copy_(block)
        reserved.commit()
    assert l1(cache).device_blocks == 0

    assert fetch(cache, key, pages) == fetch(cache, key, pages) == 4
    assert (l1(cache).device_blocks, l1(cache).device_hits) == (4, 4)
    assert fetch(cache, key, pages) == 4


def test_get_each_is_served_from_the_device(cache: KVCache) -> None:
    key = key_for(SPEC, 4)
    put(cache, key, [3, 2, 1, 0])
    cache.delete(key[1:2])
    out = [torch.zeros_like(layer) for layer in LAYERS]
    cache.get_each(key, PagedBlocks(out, range(4)))
    assert l1(cache).device_hits == 3
    for layer, target in zip(LAYERS, out, strict=True):
        assert torch.equal(layer[[3, 1, 0]].view(torch.uint8), target[[0, 2, 3]].view(torch.uint8))


def test_dense_tensors_are_served_too(cache: KVCache) -> None:
    key = key_for(SPEC, 3)
    (blocks,) = random_layers(1, (3, SPEC.nbytes), torch.uint8, 4)
    assert cache.put(key, blocks) == 3
    out, listed = torch.zeros_like(blocks), [torch.zeros(SPEC.nbytes, dtype=torch.uint8) for _ in range(3)]
    assert cache.get(key, out) == cache.get(key, listed) == 3
    assert torch.equal(out, blocks)
    assert torch.equal(torch.stack(listed), blocks)
    assert l1(cache).device_hits == 6


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_was_removed_is_not_served(cache: KVCache, how: str) -> None:
    key = key_for(SPEC, 3)
    put(cache, key, [0, 1, 2])
    cache.delete(key) if how == "delete" else cache.clear()
    assert l1(cache).device_blocks == 0
    assert fetch(cache, key, []) == 0
    put(cache, key, [7, 8, 9])  # the same names, other bytes
    assert fetch(cache, key, [7, 8, 9]) == 3


def test_a_block_that_leaves_l1_leaves_the_device(lane: str, open_paged: OpenPaged) -> None:
    slot_bytes = 4096 + -(-SPEC.nbytes // 4096) * 4096
    cache = open_paged(SPEC, capacity=4 * slot_bytes, device="cuda:0", device_capacity=20 * SLOT_BYTES)
    old, new = key_for(SPEC, 4), key_for(SPEC, 4, seed=1)
    put(cache, old, [0, 1, 2, 3])
    put(cache, new, [4, 5, 6, 7])
    assert (l1(cache).evictions, l1(cache).device_blocks) == (4, 4)
    assert fetch(cache, old, []) == 0
    assert fetch(cache, new, [4, 5, 6, 7]) == 4


def test_the_least_recently_used_makes_room(cache: KVCache) -> None:
    first, second, third = (key_for(SPEC, 8, seed=seed) for seed in range(3))
    put(cache, first, range(8))
    put(cache, second, range(8, 16))
    assert fetch(cache, first, range(8)) == 8
    put(cache, third, range(16, 24))  # 20 slots: four blocks of the second make room, its tail
    before = l1(cache).device_hits
    assert l1(cache).device_evictions == 4
    assert fetch(cache, first, range(8)) == 8
    assert l1(cache).device_hits == before + 8
    assert fetch(cache, second.prefix(4), range(8, 12)) == 4
    assert l1(cache).device_hits == before + 12


def test_a_request_larger_than_the_pool_keeps_its_head(cache: KVCache) -> None:
    key = key_for(SPEC, 30)
    put(cache, key, range(30))
    assert l1(cache).device_blocks == 20
    assert fetch(cache, key, range(30)) == 30
    assert l1(cache).device_hits == 20


def test_copies_under_way_keep_their_slots(cache: KVCache) -> None:
    key = key_for(SPEC, 20)
    put(cache, key, range(20))
    pool, stack = near(cache), cache._use().stack
    assert stack.l1 is not None
    entries = stack.l1.pin_leading(key.digests)
    slots = pool.find(entries)
    assert None not in slots
    assert pool.reserve(1) == []
    cache.delete(key)
    assert pool.reserve(1) == []
    pool.let_go(entries)
    stack.l1.unpin(entries)
    assert sorted(pool.reserve(30)) == sorted(slot for slot in slots if slot is not None)


def test_a_block_put_meanwhile_keeps_its_own_copy(cache: KVCache) -> None:
    """Two puts of a block race; the loser's bytes are not published under the winner's entry."""
    key = key_for(SPEC, 1)
    put(cache, key, [1])
    pool, stack = near(cache), cache._use().stack
    assert stack.l1 is not None
    (entry,) = stack.l1.pin_leading(key.digests)
    (slot,) = pool.reserve(1)
    pool.publish([entry], [slot])
    assert pool.gauges()["device_blocks"] == 1
    stack.l1.unpin([entry])
    assert fetch(cache, key, [1]) == 1


@pytest.mark.parametrize("direct", ["staged", "direct"])
def test_other_memory_goes_through_the_host(
    direct: str, use_lane: Callable[[str], None], open_paged: OpenPaged
) -> None:
    use_lane(direct)
    cache = open_paged(SPEC, device="cuda:0", device_capacity=20 * SLOT_BYTES)
    key = key_for(SPEC, 3)
    put(cache, key, [2, 1, 0])
    use_lane("host")  # tensors that are not on the accelerator
    assert fetch(cache, key, [2, 1, 0]) == 3
    assert l1(cache).device_hits == 0


def test_a_pool_below_one_block_is_refused(lane: str, open_paged: OpenPaged) -> None:
    with pytest.raises(CapacityError, match=r"l1.device_capacity is 100 bytes but one block slot takes 1024 bytes"):
        open_paged(SPEC, device="cuda:0", device_capacity=100)


def test_blocks_of_any_size(lane: str, open_paged: OpenPaged) -> None:
    """The widest integers that fit move them, down to single bytes."""
    for nbytes in (513, 514, 516, 520):
        spec = BlockSpec.opaque(nbytes, block_tokens=4, tag="odd")
        cache = open_paged(spec, device="cuda:0", device_capacity=1 << 16)
        (blocks,) = random_layers(1, (4, nbytes), torch.uint8, nbytes)
        key, out = key_for(spec, 4), torch.zeros(4, nbytes, dtype=torch.uint8)
        assert cache.put(key, blocks) == cache.get(key, out) == 4
        assert torch.equal(out, blocks)
        assert l1(cache).device_hits == 4


def test_threads_never_get_other_bytes(use_lane: Callable[[str], None], open_paged: OpenPaged) -> None:
    """More blocks than either pool holds, written, read and deleted at once."""
    use_lane("staged")
    slot_bytes = 4096 + -(-SPEC.nbytes // 4096) * 4096
    cache = open_paged(SPEC, capacity=24 * slot_bytes, device="cuda:0", device_capacity=10 * SLOT_BYTES)
    keys = [key_for(SPEC, 4, seed=seed) for seed in range(10)]

    def work(seed: int) -> int:
        rng, got = random.Random(seed), 0
        for _ in range(60):
            n = rng.randrange(len(keys))
            pages = range(4 * n, 4 * n + 4)
            match rng.randrange(4):
                case 0:
                    cache.put(keys[n], PagedBlocks(LAYERS, pages))
                case 1:
                    cache.delete(keys[n][rng.randrange(4) :])
                case _:
                    got += fetch(cache, keys[n], pages)
        return got

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    assert l1(cache).device_hits > 0
    assert l1(cache).device_blocks <= 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_starts_without_copies(cache: KVCache) -> None:
    key = key_for(SPEC, 3)
    put(cache, key, [0, 1, 2])
    child = os.fork()
    if not child:
        code = 1
        try:
            here = cache.get(key, PagedBlocks([torch.zeros_like(layer) for layer in LAYERS], range(3)))
            code = 0 if here == 0 and l1(cache).device_blocks == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fetch(cache, key, [0, 1, 2]) == 3
    assert l1(cache).device_hits == 3

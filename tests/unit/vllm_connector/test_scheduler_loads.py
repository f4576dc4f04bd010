"""The scheduler's half: which blocks are loaded, and that nothing waits."""

from __future__ import annotations

import threading
import time

import pytest
from kvstore_vllm.connector_keys import prompt_key
from kvstore_vllm.connector_lookup import ShardLookups
from kvstore_vllm.connector_scheduler import SchedulerHalf, SchedulerSettings

from kvstore import KVCache
from tests.unit.vllm_connector.doubles import (
    BLOCK_TOKENS,
    OpenStore,
    Output,
    Request,
    fill,
    first_step,
    half_over,
    later_step,
)


class SlowCache:
    """Answers when it is let."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.go = threading.Event()
        self.asked = 0

    def lookup(self, key: object) -> SlowCache:
        del key
        self.asked += 1
        self.go.wait(5)
        return self

    @property
    def blocks(self) -> int:
        return self.n_blocks


def ask_until_known(half: SchedulerHalf, request: Request, n_computed: int = 0) -> tuple[int | None, bool]:
    deadline = time.monotonic() + 5
    while (found := half.matched_tokens(request, n_computed))[0] is None and time.monotonic() < deadline:
        time.sleep(0)
    return found


def test_what_the_store_has_is_loaded_before_the_request_runs(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 3)
    half = half_over([store])
    half.arrived(request)
    assert half.matched_tokens(request, 0) == (12, True)
    half.allocated(request, [7, 8, 9], 12)
    plan = half.plan(Output())
    assert [(run.block_ids, run.start_block, len(run.hashes)) for run in plan.loads] == [((7, 8, 9), 0, 3)]
    assert plan.idle
    assert not plan.layerwise
    assert half.plan(Output()).loads == ()


def test_one_token_is_always_left_to_compute(store: KVCache) -> None:
    request = Request("a", range(16))
    fill(store, request, 4)
    assert half_over([store]).matched_tokens(request, 0) == (12, True)


def test_only_what_the_engine_lacks_is_loaded(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store])
    assert half.matched_tokens(request, 8) == (8, True)
    half.allocated(request, [1, 2, 3, 4], 8)
    (run,) = half.plan(Output()).loads
    assert (run.block_ids, run.start_block, len(run.hashes)) == ((3, 4), 2, 4)


def test_a_store_without_the_head_still_gives_the_rest(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    store.delete(prompt_key(request.block_hashes[:2], BLOCK_TOKENS, None))
    half = half_over([store])
    half.arrived(request)
    assert ask_until_known(half, request, 8) == (8, True)


def test_nothing_beyond_the_computed_tokens_is_no_load(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 2)
    half = half_over([store])
    assert half.matched_tokens(request, 8) == (0, False)
    assert half.matched_tokens(request, 16) == (0, False)


def test_the_scheduler_never_waits_for_a_lookup() -> None:
    cache = SlowCache(2)
    half = SchedulerHalf(SchedulerSettings(BLOCK_TOKENS))
    half.use(ShardLookups([cache], BLOCK_TOKENS))  # type: ignore[list-item]
    request = Request("a", range(18))
    half.arrived(request)
    start = time.monotonic()
    assert [half.matched_tokens(request, 0) for _ in range(100)] == [(None, False)] * 100
    assert time.monotonic() - start < 1
    cache.go.set()
    assert ask_until_known(half, request) == (8, True)
    assert cache.asked == 1


def test_a_wait_that_is_allowed_is_bounded() -> None:
    cache = SlowCache(2)
    half = half_over([cache], lookup_wait_s=0.02)  # type: ignore[list-item]
    start = time.monotonic()
    assert half.matched_tokens(Request("a", range(18)), 0) == (None, False)
    assert 0.02 <= time.monotonic() - start < 2
    cache.go.set()


def test_every_shard_must_have_a_block(make_store: OpenStore) -> None:
    request = Request("a", range(18))
    shards = [make_store(f"rank {rank}") for rank in range(3)]
    for shard, n_blocks in zip(shards, (4, 2, 3), strict=True):
        fill(shard, request, n_blocks)
    assert half_over(shards).matched_tokens(request, 0) == (8, True)


def test_a_lookup_that_raises_is_a_miss(make_store: OpenStore) -> None:
    request = Request("a", range(18))
    good, closed = make_store("good"), make_store("closed")
    fill(good, request, 4)
    closed.close()
    assert half_over([good, closed]).matched_tokens(request, 0) == (0, False)


def test_an_old_answer_is_asked_for_once_more(store: KVCache) -> None:
    request = Request("a", range(18))
    half = half_over([store], lookup_ttl_s=0.0)
    assert half.matched_tokens(request, 0) == (None, False)
    fill(store, request, 4)
    assert half.matched_tokens(request, 0)[0] is not None


def test_a_request_whose_load_failed_is_not_loaded_again(store: KVCache) -> None:
    request, other = Request("a", range(18)), Request("b", range(18))
    fill(store, request, 4)
    half = half_over([store])
    for one, ids in ((request, [1, 2, 3, 4]), (other, [5, 6, 7, 8])):
        assert half.matched_tokens(one, 0) == (16, True)
        half.allocated(one, ids, 16)
    half.plan(Output())
    half.loads_failed({3})
    half.loads_ended({"a", "b"})
    assert half.matched_tokens(request, 0) == (0, False)
    assert half.matched_tokens(other, 0) == (16, True)


def test_the_second_call_for_an_asynchronous_load_loads_nothing(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store])
    half.matched_tokens(request, 0)
    half.allocated(request, [1, 2, 3, 4], 16)
    assert len(half.plan(Output()).loads) == 1
    half.loads_ended({"a"})
    half.allocated(request, (), 0)
    assert half.plan(first_step(request, [1, 2, 3, 4, 5], 16, 2)).loads == ()


def test_an_aborted_request_is_forgotten_and_its_planned_load_is_not(store: KVCache) -> None:
    """vLLM keeps the pages of a load until the workers say that it is over."""
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store])
    half.matched_tokens(request, 0)
    half.allocated(request, [1, 2, 3, 4], 16)
    half.ended("a")
    assert half.n_requests == 0
    assert [run.request_id for run in half.plan(Output()).loads] == ["a"]


def test_a_resumed_request_is_looked_up_anew(store: KVCache) -> None:
    request = Request("a", range(10))
    half = half_over([store])
    assert half.matched_tokens(request, 0) == (0, False)
    half.allocated(request, (), 0)
    half.plan(first_step(request, [1, 2, 3], 0, 10))
    request.append(range(100, 104))
    fill(store, request, 3)
    assert half.matched_tokens(request, 0) == (12, True)
    half.allocated(request, [4, 5, 6], 12)
    assert half.plan(Output()).loads[0].block_ids == (4, 5, 6)
    assert half.plan(later_step(request, 12, 2, new_ids=[4, 5, 6, 7], resumed=True)).saves == ()


def test_a_producer_loads_nothing(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    assert half_over([store], loads=False).matched_tokens(request, 0) == (0, False)


def test_without_shards_there_is_nothing_to_load() -> None:
    assert SchedulerHalf(SchedulerSettings(BLOCK_TOKENS)).matched_tokens(Request("a", range(18)), 0) == (0, False)


def test_a_salt_is_not_shared(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4, salt="alice")
    assert half_over([store], salt="bob").matched_tokens(request, 0) == (0, False)
    assert half_over([store], salt="alice").matched_tokens(request, 0) == (16, True)


@pytest.mark.parametrize("on_reset", ["clear", "part"])
def test_after_a_reset_nothing_stored_before_is_found(store: KVCache, on_reset: str) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store], on_reset=on_reset)
    assert half.matched_tokens(request, 0) == (16, True)
    half.reset()
    assert half.matched_tokens(request, 0) == (0, False)
    plan = half.plan(Output())
    assert plan.resets == 1
    assert (plan.salt is None) == (on_reset == "clear")


def test_a_store_that_cannot_be_cleared_is_parted_from(store: KVCache) -> None:
    half = half_over([store])
    store.close()
    half.reset()
    assert half.plan(Output()).salt


def test_keep_survives_a_reset(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store], on_reset="keep")
    half.reset()
    assert half.matched_tokens(request, 0) == (16, True)
    assert half.plan(Output()).resets == 0


def test_a_request_that_would_share_a_block_under_way_waits_for_the_next_step(store: KVCache) -> None:
    """vLLM shows blocks in its prefix cache before a layerwise load has filled them."""
    first, second, other = Request("a", range(18)), Request("b", range(20)), Request("c", range(50, 68))
    fill(store, first, 3)
    half = half_over([store], layerwise=True)
    half.can_evict(lambda blocks: None)
    assert half.matched_tokens(first, 0) == (12, False)
    half.allocated(first, [1, 2, 3, 4, 5], 12)
    assert half.matched_tokens(second, 16) == (None, False)
    assert half.matched_tokens(other, 0) == (0, False)
    half.plan(first_step(first, [1, 2, 3, 4, 5], 12, 6))
    assert half.matched_tokens(second, 16) == (0, False)


def test_what_depends_on_a_failed_block_leaves_the_prefix_cache(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 3)
    half = half_over([store], layerwise=True)
    evicted: list[set[int]] = []
    half.can_evict(evicted.append)
    half.matched_tokens(request, 0)
    half.allocated(request, [1, 2, 3, 4, 5], 12)
    half.plan(first_step(request, [1, 2, 3, 4, 5], 12, 6))
    half.ended("a")  # aborted before the step's outcome is known: vLLM has its blocks back
    half.loads_failed({2})
    assert evicted == [{2, 3, 4, 5}]
    half.plan(Output())
    half.loads_failed({2})
    assert len(evicted) == 1


def test_without_a_way_to_evict_blocks_are_loaded_before_the_request_runs(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 3)
    half = half_over([store], layerwise=True)
    assert half.matched_tokens(request, 0) == (12, True)
    half.allocated(request, [1, 2, 3, 4, 5], 12)
    assert not half.plan(Output()).layerwise

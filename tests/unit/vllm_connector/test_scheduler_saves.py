"""The scheduler's half: only verified, full, computed blocks are saved, each once, from pages that are the request's."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_vllm.connector_meta import BlockRun, StepPlan
from kvstore_vllm.connector_scheduler import SchedulerHalf, SchedulerSettings

from kvstore import KVCache
from tests.unit.vllm_connector.doubles import (
    BLOCK_TOKENS,
    Output,
    Request,
    fill,
    first_step,
    half_over,
    later_step,
)


def half_of(**settings: object) -> SchedulerHalf:
    return SchedulerHalf(SchedulerSettings(BLOCK_TOKENS, **settings))  # type: ignore[arg-type]


def begin(half: SchedulerHalf, request: Request) -> None:
    half.arrived(request)
    half.matched_tokens(request, 0)
    half.allocated(request, (), 0)


def saved(plan: StepPlan) -> list[tuple[int, tuple[int, ...]]]:
    return [(run.start_block, run.block_ids) for run in plan.saves]


def hashes_of(run: BlockRun) -> tuple[bytes, ...]:
    return run.hashes[run.start_block - run.first_hash :]


def test_full_blocks_of_a_prompt_are_saved_with_its_step() -> None:
    half, request = half_of(), Request("a", range(10))
    begin(half, request)
    plan = half.plan(first_step(request, [5, 6, 7], 0, 10))
    assert saved(plan) == [(0, (5, 6))]
    assert hashes_of(plan.saves[0]) == tuple(request.block_hashes[:2])
    assert not plan.idle


def test_chunks_of_a_prompt_save_each_block_once() -> None:
    half, request = half_of(), Request("a", range(16))
    begin(half, request)
    plans = [
        half.plan(first_step(request, [1, 2], 0, 6)),
        half.plan(later_step(request, 6, 1)),
        half.plan(later_step(request, 7, 5, new_ids=[3])),
        half.plan(later_step(request, 12, 4, new_ids=[4])),
    ]
    assert [saved(plan) for plan in plans] == [[(0, (1,))], [], [(1, (2, 3))], [(3, (4,))]]
    together = [h for plan in plans for run in plan.saves for h in hashes_of(run)]
    assert together == request.block_hashes


def test_generated_tokens_are_saved_when_their_block_is_full() -> None:
    half, request = half_of(), Request("a", range(6))
    begin(half, request)
    half.plan(first_step(request, [1, 2], 0, 6))
    request.append([50])
    assert saved(half.plan(later_step(request, 6, 1))) == []
    request.append([51])
    assert saved(half.plan(later_step(request, 7, 1))) == [(1, (2,))]


def test_drafts_are_not_saved_before_they_are_verified() -> None:
    """A step computes 3 drafts behind token 6; 1 of them is rejected, and computed again as another token."""
    half, request = half_of(verified_tail_tokens=1), Request("a", range(6))
    begin(half, request)
    half.plan(first_step(request, [1, 2, 3], 0, 6))
    request.append([50])
    assert saved(half.plan(later_step(request, 6, 4))) == []  # tokens 7, 8 and 9 are drafts
    request.append([51])  # the first draft was accepted: block 1 is complete, but nothing behind it is
    assert saved(half.plan(later_step(request, 7, 4))) == []
    request.append([52, 53])
    assert saved(half.plan(later_step(request, 9, 4))) == [(1, (2,))]


def test_tokens_that_the_scheduler_only_expects_are_not_saved() -> None:
    """Asynchronous scheduling counts a token as computed before it is known."""
    half, request = half_of(), Request("a", range(7))
    begin(half, request)
    half.plan(first_step(request, [1, 2, 3], 0, 7))
    assert saved(half.plan(later_step(request, 7, 1))) == []
    request.append([50])
    assert saved(half.plan(later_step(request, 8, 1))) == [(1, (2,))]


def test_what_was_loaded_or_cached_is_not_saved_again(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 2)
    half = half_over([store])
    assert half.matched_tokens(request, 0) == (8, True)
    half.allocated(request, [1, 2], 8)
    assert half.plan(Output()).saves == ()
    half.loads_ended({"a"})
    half.allocated(request, (), 0)
    assert saved(half.plan(first_step(request, [1, 2, 3, 4, 5], 8, 10))) == [(2, (3, 4))]


def test_blocks_that_failed_to_load_are_saved_when_they_are_computed(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store])
    half.matched_tokens(request, 0)
    half.allocated(request, [1, 2, 3, 4], 16)
    half.plan(Output())
    half.loads_failed({2})
    half.loads_ended({"a"})
    assert saved(half.plan(first_step(request, [1, 2, 3, 4, 5], 4, 14))) == [(1, (2, 3, 4))]


def test_a_step_with_layerwise_loads_saves_nothing_and_the_next_one_makes_up(store: KVCache) -> None:
    request, other = Request("a", range(18)), Request("b", range(100, 112))
    fill(store, request, 2)
    half = half_over([store], layerwise=True)
    half.can_evict(lambda blocks: None)
    assert half.matched_tokens(request, 0) == (8, False)
    half.allocated(request, [1, 2, 3, 4, 5], 8)
    begin(half, other)
    output = first_step(request, [1, 2, 3, 4, 5], 8, 10)
    output.scheduled_new_reqs += first_step(other, [6, 7, 8], 0, 12).scheduled_new_reqs
    output.num_scheduled_tokens["b"] = 12
    plan = half.plan(output)
    assert plan.layerwise
    assert len(plan.loads) == 1
    assert plan.saves == ()
    request.append([50])
    other.append([51])
    output = later_step(request, 18, 1)
    more = later_step(other, 12, 1, new_ids=[9])
    for name in ("req_ids", "new_block_ids", "num_computed_tokens"):
        getattr(output.scheduled_cached_reqs, name).extend(getattr(more.scheduled_cached_reqs, name))
    output.num_scheduled_tokens["b"] = 1
    assert saved(half.plan(output)) == [(2, (3, 4)), (0, (6, 7, 8))]


def test_a_failed_layerwise_load_saves_what_is_computed_again(store: KVCache) -> None:
    request = Request("a", range(18))
    fill(store, request, 4)
    half = half_over([store], layerwise=True)
    half.can_evict(lambda blocks: None)
    half.matched_tokens(request, 0)
    half.allocated(request, [1, 2, 3, 4, 5], 16)
    half.plan(first_step(request, [1, 2, 3, 4, 5], 16, 2))
    half.loads_failed({3})
    assert saved(half.plan(later_step(request, 8, 10))) == [(2, (3, 4))]
    assert half.matched_tokens(request, 0) == (0, False)


def test_a_preempted_request_is_saved_from_its_new_pages() -> None:
    half, request = half_of(), Request("a", range(8))
    begin(half, request)
    assert saved(half.plan(first_step(request, [1, 2], 0, 8))) == [(0, (1, 2))]
    request.append([50])
    half.plan(Output())  # preempted: pages 1 and 2 are somebody else's now
    plan = half.plan(later_step(request, 0, 9, new_ids=[7, 8, 9], resumed=True))
    assert saved(plan) == [(0, (7, 8))]


def test_a_resumed_request_may_come_as_a_new_one() -> None:
    half, request = half_of(), Request("a", range(8))
    begin(half, request)
    half.plan(first_step(request, [1, 2], 0, 8))
    request.append([50, 51, 52, 53])
    assert saved(half.plan(first_step(request, [7, 8, 9, 10], 8, 4))) == [(2, (9,))]


def test_runs_continue_the_hashes_before() -> None:
    half, request = half_of(), Request("a", range(40))
    begin(half, request)
    first = half.plan(first_step(request, list(range(10)), 0, 20)).saves[0]
    second = half.plan(later_step(request, 20, 20)).saves[0]
    assert (first.first_hash, len(first.hashes)) == (0, 5)
    assert (second.first_hash, len(second.hashes)) == (5, 5)


def test_a_consumer_saves_nothing() -> None:
    half, request = half_of(saves=False), Request("a", range(8))
    begin(half, request)
    assert half.plan(first_step(request, [1, 2], 0, 8)).saves == ()


def test_a_finished_request_leaves_nothing_behind() -> None:
    half = half_of()
    requests = [Request(str(i), range(i, i + 8)) for i in range(20)]
    for request in requests:
        begin(half, request)
        half.plan(first_step(request, [1, 2], 0, 8))
        half.ended(request.request_id)
    assert half.n_requests == 0
    stray: Sequence[BlockRun] = half.plan(later_step(requests[0], 8, 1)).saves
    assert stray == ()


def test_a_plan_says_how_many_tokens_it_computes_and_behind_how_many() -> None:
    half, old, new = half_of(), Request("a", range(40)), Request("b", range(100, 120))
    begin(half, old)
    begin(half, new)
    assert (half.plan(first_step(old, [1, 2], 0, 30)).tokens, half.plan(first_step(old, [1], 0, 8)).context_tokens) == (
        30,
        0,
    )
    step = later_step(old, 30, 10)
    step.scheduled_new_reqs = first_step(new, [3], 0, 20).scheduled_new_reqs
    step.num_scheduled_tokens[new.request_id] = 20
    plan = half.plan(step)
    assert (plan.tokens, plan.context_tokens) == (30, 10)  # 10 tokens behind 30 others, 20 behind none
    assert half.plan(Output()).context_tokens == 0

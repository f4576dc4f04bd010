"""Keys of block runs: the same blocks, wherever a run begins."""

from __future__ import annotations

import pickle

from kvstore_vllm.connector_keys import RequestKeys, prompt_key
from kvstore_vllm.connector_meta import BlockRun, StepPlan

from tests.unit.vllm_connector.doubles import BLOCK_TOKENS, Request


def test_runs_of_a_request_make_the_key_of_its_prompt() -> None:
    request = Request("a", range(32))
    keys = RequestKeys(BLOCK_TOKENS, None)
    hashes = tuple(request.block_hashes)
    whole = prompt_key(hashes, BLOCK_TOKENS, None)
    first = keys.of(BlockRun("a", (1, 2), 1, hashes[:3]))
    second = keys.of(BlockRun("a", (3, 4), 4, hashes[3:6], first_hash=3))
    third = keys.of(BlockRun("a", (5,), 6, hashes[6:7], first_hash=6))
    assert first == whole.prefix(3).suffix(1)
    assert second == whole.prefix(6).suffix(4)
    assert third == whole.prefix(7).suffix(6)
    assert [key.start_block for key in (first, second, third)] == [1, 4, 6]
    assert all(key.position_known for key in (first, second, third))


def test_a_run_without_the_one_before_names_the_same_blocks() -> None:
    request = Request("a", range(32))
    hashes = tuple(request.block_hashes)
    keys = RequestKeys(BLOCK_TOKENS, "salt")
    lost = keys.of(BlockRun("a", (3, 4), 4, hashes[3:6], first_hash=3))
    assert lost.digests == prompt_key(hashes, BLOCK_TOKENS, "salt").digests[4:6]


def test_a_plan_can_be_pickled() -> None:
    plan = StepPlan(loads=(BlockRun("a", (1,), 0, (b"x" * 32,)),), resets=2, salt="s")
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - as vLLM's executors send it

"""The connector tells the cache how fast the model computes, and loads nothing that is slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_transformers import CachedModel, open_cache

Prompt = Callable[..., torch.Tensor]


@pytest.fixture
def cached(model: Any, tmp_path: Path) -> Iterator[CachedModel]:
    lmdb = {"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "64MiB"}
    with open_cache(model, {"l1": {"enabled": False}, "l2": [lmdb]}, block_tokens=16) as opened:
        yield opened


def test_prefills_tell_the_cache_how_fast_the_model_is(cached: CachedModel, make_prompt: Prompt) -> None:
    seconds = []
    for seed in range(4):
        assert cached.cache.stats().prefill_tokens_per_s == 0.0 or seed == 3
        result = cached.prefill(make_prompt(161, seed))
        seconds.append(result.timings.compute_s)
    speed = cached.cache.stats().prefill_tokens_per_s
    assert 160 / max(seconds) <= speed  # the last token is computed apart and does not count
    assert speed < 1e7


def test_a_prompt_that_loads_slower_than_it_computes_is_computed(cached: CachedModel, make_prompt: Prompt) -> None:
    cold = cached.prefill(make_prompt(161))
    cached.cache.flush(20)
    for seed in range(1, 4):
        cached.prefill(make_prompt(161, seed))
    assert cached.cache._state is not None
    for n_blocks in (1, 10) * 4:
        cached.cache._state.stack.tiers[0].reader.times.note(n_blocks, 100.0 * n_blocks)
    assert cached.cached_tokens(make_prompt(161)) == 0
    again = cached.prefill(make_prompt(161))
    assert (again.restored_tokens, again.computed_tokens) == (0, 161)
    assert torch.equal(again.logits.view(torch.uint8), cold.logits.view(torch.uint8))
    assert cached.cache.stats().tiers[0].counters.gated == 10

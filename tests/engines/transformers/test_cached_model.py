"""A prompt that was seen before is restored, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_transformers import CachedModel, identify_model, open_cache
from kvstore_transformers.forward import Forward
from kvstore_transformers.layout import blocks_of_cache

from kvstore import BlockSpec, ClosedError, KVCache, Namespace

Build = Callable[..., Any]
Prompt = Callable[..., torch.Tensor]

BLOCK_TOKENS = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    lmdb = {"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "64MiB"}
    return {"l1": {"capacity": "8MiB"}, "l2": [lmdb]}


@pytest.fixture
def cached(model: Any, config: dict[str, Any]) -> Any:
    with open_cache(model, config, block_tokens=BLOCK_TOKENS) as opened:
        yield opened


def tokens(cached: CachedModel, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    output = cached.generate(ids, **({"do_sample": False} | arguments))
    assert isinstance(output, torch.Tensor)
    return output


def generate_cut_alike(model: Any, ids: torch.Tensor, full_tokens: int) -> torch.Tensor:
    """The model's own generate, without kvstore, after a first pass over the full blocks."""
    forward = Forward(model)
    cache = forward.new_cache()
    if full_tokens:
        forward.run(ids[:, :full_tokens], cache)
    arguments = {forward.cache_argument: cache, "attention_mask": torch.ones_like(ids)}
    output: torch.Tensor = model.generate(ids, **arguments, **GREEDY)
    return output


def same_kv(left: Any, right: Any, cached: CachedModel, n_blocks: int) -> bool:
    spec = cached.cache.spec
    pair = [blocks_of_cache(cache, spec, 0, n_blocks).view(torch.uint8) for cache in (left, right)]
    return torch.equal(pair[0], pair[1])


def test_new_process_restores_what_another_one_stored(model: Any, config: dict[str, Any], make_prompt: Prompt) -> None:
    """Two openings of one store stand for two processes; the demo's test uses real ones."""
    ids = make_prompt(101)
    with open_cache(model, config, block_tokens=BLOCK_TOKENS) as first:
        cold = first.prefill(ids)
    with open_cache(model, config, block_tokens=BLOCK_TOKENS) as second:
        assert second.cached_tokens(ids) == 96
        warm = second.prefill(ids)

        assert (cold.restored_tokens, cold.computed_tokens, cold.stored_tokens) == (0, 101, 96)
        assert (warm.restored_tokens, warm.computed_tokens, warm.stored_tokens) == (96, 5, 0)
        assert same_kv(cold.past_key_values, warm.past_key_values, second, 6)
        assert torch.equal(cold.logits.view(torch.uint8), warm.logits.view(torch.uint8))


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 32, 33, 100])
def test_restored_generate_equals_plain_generate(
    model: Any, cached: CachedModel, make_prompt: Prompt, n_tokens: int
) -> None:
    ids = make_prompt(n_tokens)
    full_tokens = (n_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    expected = generate_cut_alike(model, ids, full_tokens)

    cold = tokens(cached, ids, **GREEDY)
    assert cached.cached_tokens(ids) == full_tokens
    restored = tokens(cached, ids, **GREEDY)

    assert torch.equal(cold, expected)
    assert torch.equal(restored, expected)


def test_last_token_is_always_computed(cached: CachedModel, make_prompt: Prompt) -> None:
    """A prompt of whole blocks, all of them stored: its logits still have to come from somewhere."""
    ids = make_prompt(48)

    assert cached.prefill(ids).stored_tokens == 48
    assert cached.cached_tokens(ids) == 32
    assert cached.prefill(ids).restored_tokens == 32
    longer = torch.cat([ids, make_prompt(1)], dim=1)
    assert cached.prefill(longer).restored_tokens == 48


def test_shared_document_is_restored_under_another_question(cached: CachedModel, make_prompt: Prompt) -> None:
    document = make_prompt(64)
    first = torch.cat([document, make_prompt(40, seed=2)], dim=1)
    second = torch.cat([document, make_prompt(40, seed=3)], dim=1)
    cached.prefill(first)

    result = cached.prefill(second)

    assert (result.restored_tokens, result.computed_tokens, result.stored_tokens) == (64, 40, 32)
    assert result.past_key_values.get_seq_length() == 104
    assert cached.prefill(second).restored_tokens == 96


def test_generated_blocks_are_stored_only_on_request(cached: CachedModel, make_prompt: Prompt) -> None:
    """The next turn of a conversation starts with the answer of this one."""
    ids = make_prompt(20)
    output = tokens(cached, ids, max_new_tokens=30)
    assert cached.cached_tokens(output) == 16

    again = tokens(cached, ids, max_new_tokens=30, store_generated=True)

    assert torch.equal(output, again)
    assert output.shape[1] == 50
    assert cached.cached_tokens(output) == 48


def test_generated_blocks_hold_the_kv_of_their_tokens(cached: CachedModel, make_prompt: Prompt) -> None:
    ids = make_prompt(20)
    output: Any = cached.generate(
        ids, do_sample=False, max_new_tokens=30, store_generated=True, return_dict_in_generate=True
    )

    restored = cached.prefill(output.sequences)

    assert restored.restored_tokens == 48
    assert same_kv(restored.past_key_values, output.past_key_values, cached, 3)


def test_padding_ids_inside_a_prompt_are_ordinary_tokens(build_model: Build, config: dict[str, Any]) -> None:
    model = build_model(pad_token_id=0, eos_token_id=None)
    ids = torch.zeros((1, 40), dtype=torch.int64)
    with open_cache(model, config, block_tokens=BLOCK_TOKENS) as cached:
        expected = generate_cut_alike(model, ids, 32)

        assert torch.equal(tokens(cached, ids, **GREEDY), expected)
        assert torch.equal(tokens(cached, ids, **GREEDY), expected)


def test_other_weights_see_nothing(model: Any, build_model: Build, config: dict[str, Any], make_prompt: Prompt) -> None:
    ids = make_prompt(40)
    with open_cache(model, config, block_tokens=BLOCK_TOKENS) as cached:
        cached.prefill(ids)
    with open_cache(build_model(seed=9), config, block_tokens=BLOCK_TOKENS) as other:
        assert other.prefill(ids).restored_tokens == 0
    with open_cache(build_model(), config, block_tokens=BLOCK_TOKENS) as same:
        assert same.prefill(ids).restored_tokens == 32


@pytest.mark.parametrize("apart", [("tenant-2", "style@1"), ("tenant-1", "style@2")])
def test_salt_and_adapter_keep_blocks_apart(
    model: Any, config: dict[str, Any], make_prompt: Prompt, apart: tuple[str, str]
) -> None:
    ids = make_prompt(40)
    with open_cache(model, config, salt="tenant-1", adapter="style@1") as cached:
        cached.prefill(ids)
        assert cached.prefill(ids).restored_tokens == 32
    with open_cache(model, config, salt=apart[0], adapter=apart[1]) as other:
        assert other.prefill(ids).restored_tokens == 0


def test_store_that_lost_its_blocks_costs_time_only(cached: CachedModel, make_prompt: Prompt) -> None:
    ids = make_prompt(100)
    cold = cached.prefill(ids)
    cached.cache.clear()

    again = cached.prefill(ids)

    assert again.restored_tokens == 0
    assert torch.equal(cold.logits.view(torch.uint8), again.logits.view(torch.uint8))


def test_hole_in_the_store_restores_the_prefix_before_it(cached: CachedModel, make_prompt: Prompt) -> None:
    ids = make_prompt(100)
    cached.prefill(ids)
    cached.cache.delete(cached._key(ids).suffix(2).prefix(1))

    result = cached.prefill(ids)

    assert (result.restored_tokens, result.computed_tokens) == (32, 68)
    assert cached.prefill(ids).restored_tokens == 96


def test_timings_add_up(cached: CachedModel, make_prompt: Prompt) -> None:
    timings = cached.prefill(make_prompt(40)).timings

    assert timings.to_logits_s == timings.restore_s + timings.inject_s + timings.compute_s
    assert min(timings.restore_s, timings.inject_s, timings.compute_s, timings.store_s) > 0


def test_closed_cache_says_so(model: Any, config: dict[str, Any], make_prompt: Prompt) -> None:
    cached = open_cache(model, config)
    cached.close()
    cached.close()

    with pytest.raises(ClosedError):
        cached.prefill(make_prompt(40))


def test_cache_of_another_layout_is_refused(model: Any) -> None:
    spec = identify_model(model).spec
    other = BlockSpec(spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens, spec.dtype, layout="NCLD")
    with (
        KVCache.open({"l1": {"capacity": "1MiB"}}, spec=other, namespace=Namespace(model="m", revision="1")) as cache,
        pytest.raises(ValueError, match="identify_model"),
    ):
        CachedModel(model, cache)

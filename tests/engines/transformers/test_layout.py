"""Blocks and the model's cache hold the same bytes in either shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvstore_transformers.forward import Forward
from kvstore_transformers.layout import blocks_of_cache, fill_cache, room_for_blocks, spec_of_cache

Prompt = Callable[..., torch.Tensor]


def states(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture
def filled(model: Any, make_prompt: Prompt) -> Any:
    forward = Forward(model)
    cache = forward.new_cache()
    forward.run(make_prompt(40), cache)
    return cache


def test_spec_is_read_off_the_cache(filled: Any) -> None:
    spec = spec_of_cache(filled, 16)

    assert spec.shape == (2, 2, 16, 2, 8)
    assert (spec.dtype, spec.layout) == ("bfloat16", "LCND")


def test_block_element_is_the_cache_element(filled: Any) -> None:
    """Checked index by index against the definition, not against the same permutation."""
    blocks = blocks_of_cache(filled, spec_of_cache(filled, 8), 1, 3)

    assert blocks.shape == (3, 2, 2, 8, 2, 8)
    for block, layer, kv, token, head in [(0, 0, 0, 0, 0), (2, 1, 1, 7, 1), (1, 0, 1, 3, 1), (2, 1, 0, 5, 0)]:
        expected = states(filled)[2 * layer + kv][0, head, (1 + block) * 8 + token]
        assert same_bytes(blocks[block, layer, kv, token, head], expected)


@pytest.mark.parametrize("block_tokens", [1, 5, 8, 40])
def test_round_trip_keeps_every_byte(model: Any, filled: Any, block_tokens: int) -> None:
    spec = spec_of_cache(filled, block_tokens)
    n_blocks = 40 // block_tokens
    room, as_blocks = room_for_blocks(spec, n_blocks)
    as_blocks.copy_(blocks_of_cache(filled, spec, 0, n_blocks))
    restored = Forward(model).new_cache()

    fill_cache(restored, room)

    assert restored.get_seq_length() == 40
    for old, new in zip(states(filled), states(restored), strict=True):
        assert same_bytes(old, new)


def test_blocks_seen_in_the_models_order_share_its_memory(filled: Any) -> None:
    room, as_blocks = room_for_blocks(spec_of_cache(filled, 8), 2)

    assert as_blocks.shape == (2, 2, 2, 8, 2, 8)
    assert as_blocks.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()


def test_filling_copies_nothing(model: Any, filled: Any) -> None:
    room, _ = room_for_blocks(spec_of_cache(filled, 8), 2)
    cache = Forward(model).new_cache()

    fill_cache(cache, room)

    assert states(cache)[3].untyped_storage().data_ptr() == room.untyped_storage().data_ptr()


def test_empty_cache_has_no_spec(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="layer 0 of the model cache holds no K/V"):
        spec_of_cache(Forward(model).new_cache(), 16)


def test_layers_of_different_shape_are_refused(filled: Any) -> None:
    filled.layers[1].values = filled.layers[1].values[..., :4]

    with pytest.raises(NotImplementedError, match=r"values of layer 1 are \(1, 2, 40, 4\)"):
        spec_of_cache(filled, 16)

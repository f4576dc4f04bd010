"""Ratios on real KV blocks; random numbers would flatter every codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvstore_zstd.planes_base import FEWEST_TOKENS, typical_exponents

from kvstore.spec import BlockSpec


def ratio(trip: Any, blocks: list[tuple[BlockSpec, Any]], codec: str) -> float:
    raw = stored = 0
    for spec, block in blocks:
        journey = trip(spec, codec)
        encoded = journey.encode(block.tobytes())
        assert journey.decode(b"".join(encoded.buffers)) == block.tobytes()
        raw += block.nbytes
        stored += encoded.nbytes
    return raw / stored


@pytest.mark.parametrize(("codec", "least"), [("zstd", 1.25), ("planes", 1.44), ("planes-base", 1.48)])
def test_ratio_on_the_real_bf16_blocks_together(trip: Any, real_blocks: Any, codec: str, least: float) -> None:
    blocks = real_blocks("bf16*")
    assert len(blocks) == 5
    assert ratio(trip, blocks, codec) >= least


@pytest.mark.parametrize(("dtype", "least"), [("float8_e4m3fn", 1.16), ("int8", 1.1)])
def test_8_bit_kv_falls_to_zstd_and_still_shrinks(
    trip: Any, real_blocks: Any, planes_name: str, dtype: str, least: float
) -> None:
    pattern = "int8*LCND*" if dtype == "int8" else "fp8*LCND*"
    assert ratio(trip, real_blocks(pattern, dtype), planes_name) >= least


def test_apart_from_few_tokens_the_table_of_exponents_pays(trip: Any, real_blocks: Any) -> None:
    for tokens in (FEWEST_TOKENS, 16):
        cut = [
            (
                BlockSpec(spec.layers, spec.kv_heads, spec.head_dim, tokens, "bfloat16"),
                np.ascontiguousarray(b[:, :, :tokens]),
            )
            for spec, b in real_blocks("bf16*16tok*")
        ]
        assert ratio(trip, cut, "planes-base") > ratio(trip, cut, "planes")


def test_few_tokens_in_a_segment_do_without_a_table(trip: Any, real_blocks: Any) -> None:
    """Four tokens: still smaller than planes, because the exponents are whole."""
    cut = [
        (BlockSpec(spec.layers, spec.kv_heads, spec.head_dim, 4, "bfloat16"), np.ascontiguousarray(b[:, :, :4]))
        for spec, b in real_blocks("bf16*16tok*")
    ]
    assert ratio(trip, cut, "planes-base") > ratio(trip, cut, "planes")


def test_the_typical_exponent_is_the_largest_of_few_tokens_and_the_mean_of_largest_of_many() -> None:
    few = np.array([[[1, 9], [5, 2], [3, 3]]], np.uint8)
    assert typical_exponents(few).tolist() == [[5, 9]]
    many = np.zeros((1, 48, 1), np.uint8)
    many[0, [3, 20, 40], 0] = 10, 20, 60
    assert typical_exponents(many).tolist() == [[30]]

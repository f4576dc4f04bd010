"""Engine hash chains: against published values and against cbor2."""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import KVCacheKey
from kvstore.keys.chains import (
    cbor,
    sglang_namespace_seed,
    sglang_page_hashes,
    vllm_block_hashes,
    vllm_none_hash,
    vllm_offload_key,
)

cbor_values = st.recursive(
    st.none() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=30) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=40,
)


@given(cbor_values)
def test_cbor_is_what_cbor2_writes_canonically(value: Any) -> None:
    assert cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("bits", [0, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_cbor_integers_take_the_shortest_form_on_both_sides_of_each_width(bits: int, delta: int) -> None:
    for number in ((1 << bits) + delta, 23 + delta, -(1 << bits) + delta, -24 + delta):
        assert cbor(number) == cbor2.dumps(number, canonical=True)


@pytest.mark.parametrize("value", [True, 1.5, {}, {1}, bytearray(b"a"), object(), (1, [2.5])])
def test_cbor_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="expected int, bytes, str, list, tuple or None"):
        cbor(value)


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1])
def test_cbor_integer_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        cbor(value)


# Values printed by vLLM itself (commit 29bf597539, sha256_cbor), as published in the tests of
# ai-dynamo/dynamo's engine chain hasher.
SPREAD = [(i * 7919 + 13) % 152_064 for i in range(300)]
SEED_0 = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
WITH_KEYS: list[tuple[Any, str]] = [
    (None, "199e2f20e73a6e2cc3e0e6fdf521eff7b636122d5e122320c22c380d95e5863e"),
    ((("0123456789abcdef" * 4, 5),), "3597444c4db23e603150784eeb8467b6895e64d29667e2496941709e6bad8adb"),
    (("my-salt",), "84611d254438937d076c5739d973f17e1febd6a252387f535357a817319908b0"),
    ((("aaaa", 3), "my-salt"), "3f56ea40d074550a58b6ddadba236109d86356a3cc0aeca8a0c70c4be0df5cc0"),
    ((("aaaa", -3),), "c914451f83e397a290b4a1749465eb9a832fc78ef98f8e32dace9514242864f2"),
]


def test_vllm_chain_is_what_vllm_computes() -> None:
    assert vllm_none_hash().hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    assert [h.hex() for h in vllm_block_hashes(SPREAD, 128)] == [
        "3c922374e6fe67f3c64e75b88a3b8bd6185b538f7019674b72aefbf8dd8754f8",
        "2e69fa8c8aebe362593b51b8b212f1aeb45f9bb56c4258c0bf2a94f1e384e2a5",
    ]


@pytest.mark.parametrize(("keys", "expected"), WITH_KEYS)
def test_vllm_extra_keys_are_hashed_as_vllm_hashes_them(keys: Any, expected: str) -> None:
    assert vllm_none_hash("0").hex() == SEED_0
    assert (
        vllm_block_hashes(range(1000, 1128), 128, extra_keys=[keys], none_hash=bytes.fromhex(SEED_0))[0].hex()
        == expected
    )


def test_vllm_extra_keys_of_a_later_block_change_that_block() -> None:
    twice = [*range(1000, 1128)] * 2
    keys = [None, (("aaaa", 0), ("bbbb", 64))]

    hashes = vllm_block_hashes(twice, 128, extra_keys=keys, none_hash=bytes.fromhex(SEED_0))

    assert [h.hex() for h in hashes] == [
        WITH_KEYS[0][1],
        "2ea9f0275be48f4499ccdd95ca2d8cd26c5a995c2a9b08d7aa4ef2a5902569fc",
    ]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=30),
    st.integers(1, 5),
    st.sampled_from([None, (), (("lora", "a", "/p"),)]),
)
def test_vllm_chain_is_its_definition(tokens: list[int], block_tokens: int, keys: Any) -> None:
    n_blocks = len(tokens) // block_tokens
    expected, parent = [], hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
    for i in range(n_blocks):
        block = tuple(tokens[i * block_tokens : (i + 1) * block_tokens])
        parent = hashlib.sha256(cbor2.dumps((parent, block, keys or None), canonical=True)).digest()
        expected.append(parent)

    assert vllm_block_hashes(np.array(tokens, np.int64), block_tokens, extra_keys=[keys] * n_blocks) == expected
    if keys is None:
        assert vllm_block_hashes(tokens, block_tokens) == expected


def test_vllm_chain_can_be_continued() -> None:
    whole = vllm_block_hashes(range(64), 16)

    assert vllm_block_hashes(range(32, 64), 16, none_hash=whole[1]) == whole[2:]


def test_vllm_extra_keys_must_be_one_per_block() -> None:
    with pytest.raises(ValueError, match="extra_keys has 1 entries; expected 2, one per whole block"):
        vllm_block_hashes(range(40), 16, extra_keys=[None])


def test_vllm_offload_key_ends_in_the_group() -> None:
    assert vllm_offload_key(b"h" * 32, 258) == b"h" * 32 + b"\0\0\1\2"
    assert vllm_offload_key(b"h" * 32) == b"h" * 32 + bytes(4)


def test_sglang_chain_is_its_definition() -> None:
    # As SGLang 0.5.23's native hash does, which was compared with this formula.
    first = hashlib.sha256(struct.pack("<4I", 1000, 1001, 1002, 1003))
    second = hashlib.sha256(first.digest() + struct.pack("<4I", 1004, 1005, 1006, 2**32 - 1))

    hashes = sglang_page_hashes([*range(1000, 1007), 2**32 - 1, 5], 4)

    assert hashes == [first.hexdigest(), second.hexdigest()]
    assert hashes[0].startswith("1d533aec2cd826f8")
    assert sglang_page_hashes([1004, 1005, 1006, 2**32 - 1], 4, seed=hashes[0]) == hashes[1:]


def test_sglang_page_that_is_not_full_has_no_hash() -> None:
    assert sglang_page_hashes(range(3), 4) == []
    assert sglang_page_hashes([], 4) == []


def test_sglang_namespace_seed_tells_parts_apart() -> None:
    pairs = [(None, "a"), ("a", None), ("", None), (None, ""), ("", ""), ("a", "b"), ("ab", ""), ("é", "🔑")]
    seeds = [sglang_namespace_seed(*pair) for pair in pairs]

    assert sglang_namespace_seed(None, None) is None
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == hashlib.sha256(b"sglang-cache-namespace-v1\0\1\1\0\0\0\0\0\0\0a").hexdigest()
    assert sglang_page_hashes(range(4), 4, seed=seeds[0]) != sglang_page_hashes(range(4), 4)


@pytest.mark.parametrize("seed", ["", "ab", "ab" * 33])
def test_sglang_seed_of_another_length_is_refused(seed: str) -> None:
    with pytest.raises(ValueError, match=f"seed has {len(seed) // 2} bytes; expected 32, as 64 hex digits"):
        sglang_page_hashes(range(4), 4, seed=seed)


@pytest.mark.parametrize("chain", [vllm_block_hashes, sglang_page_hashes])
def test_bad_block_size_and_bad_token_are_refused(chain: Any) -> None:
    with pytest.raises(ValueError, match="_tokens is 0; expected 1 to"):
        chain([1], 0)
    with pytest.raises(ValueError, match=re.escape("tokens[0] is -1")):
        chain([-1], 1)


def test_engine_hashes_make_stand_alone_keys() -> None:
    for hashes in (vllm_block_hashes(range(64), 16), sglang_page_hashes(range(64), 16)):
        key = KVCacheKey.from_block_hashes(hashes, block_tokens=16, chained=True)

        assert key.suffix(2) == KVCacheKey.from_block_hashes(hashes[2:], block_tokens=16, chained=True)

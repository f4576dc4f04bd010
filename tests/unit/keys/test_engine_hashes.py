"""Hashes of a request as its engine computes them: against values that vLLM 0.32 and SGLang 0.5.23 printed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVCacheKey
from kvstore.engine_hashes import sglang_page_hashes, vllm_block_hashes

SPREAD = [(i * 7919 + 13) % 152_064 for i in range(40)]
WIDE = [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1]  # both sides of each width that CBOR has
LORA = ("tuned", "/adapters/tuned")
IMAGE = ("mm", "sha256:cat", -3)
EMBEDDINGS = ("prompt_embeds", bytes(range(32)))

# vllm.v1.core.kv_cache_utils.hash_block_tokens(sha256_cbor, ...) after init_none_hash(sha256_cbor)
VLLM: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": (
        {},
        [
            "11dbff107932c6a93362311bc1e0c5c53f91709d25e9cfcdb7a7689a1fc5ba5f",
            "e8a15ba9d8006b383c3ddd4bd0e996699339ed478272f6f434405deb6bad9443",
        ],
    ),
    "salt": (
        {"cache_salt": "tenant"},
        [
            "f76985993f3ce1673c63923303c68048108ca064e8459dbcb5f4f8e98527dccd",
            "d655cd118b07f3d633ccd8b9956e439241354da316ba95c138bffff0c1cd987b",
        ],
    ),
    "lora": (
        {"lora": LORA},
        [
            "74f7fbc495b346394806afc1c55ea77fe42da16822d858ffc3c6b13766335bf3",
            "fa1abd250510f7155536e2167fc6437dcd70dcb4b94a7ac6eeeea7a5aeb637e5",
        ],
    ),
    "everything": (
        {"lora": LORA, "cache_salt": "tenant", "extra_keys": {0: [IMAGE, EMBEDDINGS], 1: [IMAGE]}},
        [
            "d7d553fb782ef87ecd0060922da1d8dcc0cf083498c22297f1fb96cbe5c6674d",
            "4c08bbf4a2f2c1dadc76367094e3ac6ea3a436d9ab56af2ad7fca209c351f77e",
        ],
    ),
    "seed": (
        {"hash_seed": "17"},
        [
            "b2b836fc1ac63142a28471e59a097ebabd6076b8668264155c6dc812f790c68f",
            "a7125478c393b12925e566544bbb701f1387fdb3c45ca8a4c72747e6a9bb20af",
        ],
    ),
}

# sglang.srt.mem_cache.utils.get_storage_hash_str (native hash), whole pages
SGLANG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": (
        {},
        [
            "4d0de4f1ef832a7ed88966c6e5ac360e4701a071400746a7ece9a6af9a299ebb",
            "03c1c37635159a871aa422f44ba9fe704a60386da16f48b4f68850c86bb26d24",
        ],
    ),
    "extra key": (
        {"extra_key": "lora:é"},
        [
            "2a824237bc9b1af2031c2794031949508ad750565127ea62888eef7aa5cae8cf",
            "cb42e173cb908bbadf8348ed0cdbe3d00336ab36786b04d76f84fe84afb08411",
        ],
    ),
    "salt": (
        {"cache_salt": "tenant"},
        [
            "d14affb73ac93537a14235fa735e6e7e93a16a83fea13e40b7a6d59d2cbe4a96",
            "6d0c90ff349b453ce77fbf0514c50fd35dbe25abb583ffee7c81caa858c9e3dd",
        ],
    ),
    "empty extra key and salt": (
        {"extra_key": "", "cache_salt": "tenant"},
        [
            "f1bb5b6af119fe9f2d94b4ec221bd168ee6de31d36fc2270e260c7ee330834ff",
            "53d05ed298e3858b91ea5a062c290bc078b4d93eb1246d3f2be28683e7331c75",
        ],
    ),
}


@pytest.mark.parametrize("name", VLLM)
def test_vllm_hashes_are_what_vllm_printed(name: str) -> None:
    arguments, expected = VLLM[name]
    assert [h.hex() for h in vllm_block_hashes(SPREAD, block_tokens=16, **arguments)] == expected


def test_vllm_tokens_of_every_width_are_hashed_alike() -> None:
    assert [h.hex() for h in vllm_block_hashes(WIDE, block_tokens=4)] == [
        "dc7fbfd287fac7b6243222eb8a406c3a145df86542e11806ae74c52db0f7a8e2",
        "1574b893f40f230a5e277f8b86c4ed770e35331efd2a8a6e2e01c476a1e11e0a",
    ]


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_hashes_are_what_sglang_printed(name: str) -> None:
    arguments, expected = SGLANG[name]
    assert sglang_page_hashes(SPREAD, page_tokens=16, **arguments) == expected


def test_sglang_tokens_of_every_width_are_hashed_alike() -> None:
    assert sglang_page_hashes(WIDE, page_tokens=4) == [
        "b152770914727e87f17be69271cbc1f23fea1cabe1811781b573f713b27f5d44",
        "1f075b0616714c35f2951effdd99fd54ca424c283c0b2a27163daf92b8182012",
    ]


@pytest.mark.parametrize("tokens", [tuple(SPREAD), np.array(SPREAD, np.int32), torch.tensor(SPREAD)], ids=type)
def test_containers_of_equal_tokens_give_equal_hashes(tokens: Any) -> None:
    assert vllm_block_hashes(tokens, block_tokens=16) == vllm_block_hashes(SPREAD, block_tokens=16)
    assert sglang_page_hashes(tokens, page_tokens=16) == sglang_page_hashes(SPREAD, page_tokens=16)


def test_incomplete_blocks_have_no_hash() -> None:
    assert len(vllm_block_hashes(SPREAD, block_tokens=16)) == len(sglang_page_hashes(SPREAD, page_tokens=16)) == 2
    assert vllm_block_hashes(SPREAD[:15], block_tokens=16, cache_salt="tenant") == []
    assert sglang_page_hashes(SPREAD[:15], page_tokens=16, cache_salt="tenant") == []


def test_an_empty_hash_seed_is_a_seed() -> None:
    assert vllm_block_hashes(SPREAD, block_tokens=16, hash_seed="") != vllm_block_hashes(SPREAD, block_tokens=16)


def test_prompt_embeddings_follow_the_salt_wherever_they_are_given() -> None:
    first, second = (
        vllm_block_hashes(SPREAD, block_tokens=16, cache_salt="tenant", extra_keys={0: keys})
        for keys in ([EMBEDDINGS, IMAGE], [IMAGE, EMBEDDINGS])
    )
    assert first == second


def test_what_separates_requests_changes_every_hash() -> None:
    plain = vllm_block_hashes(SPREAD, block_tokens=16)
    for name in ("salt", "lora", "everything", "seed"):
        changed = vllm_block_hashes(SPREAD, block_tokens=16, **VLLM[name][0])
        assert not set(plain) & set(changed), name


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_bad_block_size_is_refused(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_tokens"):
        vllm_block_hashes(SPREAD, block_tokens=size)
    with pytest.raises((TypeError, ValueError), match="page_tokens"):
        sglang_page_hashes(SPREAD, page_tokens=size)


def test_a_bad_token_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"tokens\[1\] is -1"):
        vllm_block_hashes([1, -1], block_tokens=1)
    with pytest.raises(ValueError, match=r"tokens\[1\] is -1"):
        sglang_page_hashes([1, -1], page_tokens=1)


def test_extra_keys_of_a_block_before_the_first_are_refused() -> None:
    with pytest.raises(ValueError, match="block number in extra_keys"):
        vllm_block_hashes(SPREAD, block_tokens=16, extra_keys={-1: [IMAGE]})


def test_the_hashes_name_blocks_that_stand_alone() -> None:
    hashes = sglang_page_hashes(SPREAD, page_tokens=16)
    key = KVCacheKey.from_block_hashes(hashes, block_tokens=16, chained=True)
    assert key.suffix(1) == KVCacheKey.from_block_hashes(hashes[1:], block_tokens=16, chained=True)

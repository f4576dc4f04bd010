"""``kvstore.engine_hashes`` against the engines that are installed, live, on random prompts."""

from __future__ import annotations

import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.engine_hashes import sglang_page_hashes, vllm_block_hashes

pytestmark = pytest.mark.engine

WORDS = ["", "tenant-a", "lora:é", "x" * 300]


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(7)
    limits = [1, 24, 256, 65_536, 152_064, 2**32 - 1]
    return [[rng.randint(0, rng.choice(limits)) for _ in range(rng.randint(0, 70))] for _ in range(n)]


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make test-engines)")
def test_sglang_hashes_are_those_of_the_installed_sglang() -> None:
    from tests.engines.sglang import rig

    class Key:
        """What SGLang's hasher reads of a radix key."""

        def __init__(self, token_ids: list[int], extra_key: str | None, cache_salt: str | None) -> None:
            self.token_ids, self.extra_key, self.cache_salt = token_ids, extra_key, cache_salt

        def __len__(self) -> int:
            return len(self.token_ids)

    rng = random.Random(8)
    for tokens in prompts(100):
        page = rng.choice([1, 2, 16, 64])
        extra_key, salt = (rng.choice([None, *WORDS]) for _ in range(2))
        whole = tokens[: len(tokens) // page * page]
        expected = rig.utils.get_storage_hash_str(Key(whole, extra_key, salt), None, page_size=page)
        assert sglang_page_hashes(tokens, page_tokens=page, extra_key=extra_key, cache_salt=salt) == expected


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make test-engines)")
@pytest.mark.parametrize("seed", [None, "0", "17"])
def test_vllm_hashes_are_those_of_the_installed_vllm(seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    kv_cache_utils.init_none_hash(sha256_cbor)
    rng = random.Random(9)
    for tokens in prompts(60):
        block = rng.choice([1, 2, 16, 32])
        lora = rng.choice([None, ("tuned", "/adapters/tuned")])
        salt = rng.choice([None, *WORDS])
        request = SimpleNamespace(
            lora_request=lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
            mm_features=[],
            cache_salt=salt,
            prompt_embeds=None,
        )
        expected: list[Any] = []
        previous = None
        for start in range(0, len(tokens) // block * block, block):
            extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block, 0)
            ids = tokens[start : start + block]
            previous = kv_cache_utils.hash_block_tokens(sha256_cbor, previous, ids, extra)
            expected.append(bytes(previous))
        found = vllm_block_hashes(tokens, block_tokens=block, lora=lora, cache_salt=salt, hash_seed=seed)
        assert found == expected

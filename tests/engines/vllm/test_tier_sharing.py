"""What vLLM stored is found by a program that knows only the token ids, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")

from kvstore import KVCache, KVCacheKey
from kvstore.engine_hashes import vllm_block_hashes
from tests.engines.vllm.conftest import read_namespace, store_folder
from tests.engines.vllm.rig import BLOCK_TOKENS, Engine, Run, prompt, run_engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = prompt(3, 700)
WHOLE_BLOCKS = 700 // BLOCK_TOKENS


def key_of(tokens: list[int]) -> KVCacheKey:
    hashes = vllm_block_hashes(tokens, block_tokens=BLOCK_TOKENS)
    return KVCacheKey.from_block_hashes(hashes, block_tokens=BLOCK_TOKENS, chained=True, prefix=[])


def test_blocks_travel_between_vllm_and_a_plain_program(
    tiny_model: Path, make_tier: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The short name by entry point, vLLM's core in a process of its own, its default of everything else."""
    theirs, ours = make_tier("lmdb"), make_tier("lmdb")
    run_engines(tiny_model, [Engine(runs=[Run([PROMPT])], tiers=[theirs])], multiprocess=True)

    namespace, spec = read_namespace(store_folder(theirs))
    assert (namespace.engine, namespace.model) == ("vllm", "LlamaForCausalLM")
    key = key_of(PROMPT)
    blocks = torch.zeros(len(key), *spec.shape, dtype=torch.uint8)
    with KVCache.open(theirs["config"] | {"l1": {"enabled": False}}, spec=spec, namespace=namespace) as cache:
        assert cache.get(key, blocks) == WHOLE_BLOCKS
    assert len({bytes(block.numpy()[:64]) for block in blocks}) == WHOLE_BLOCKS

    with KVCache.open(ours["config"] | {"l1": {"enabled": False}}, spec=spec, namespace=namespace) as cache:
        assert cache.put(key, blocks) == WHOLE_BLOCKS
        cache.flush(30)
    report = run_engines(tiny_model, [Engine(runs=[Run([PROMPT])], tiers=[ours])], multiprocess=True)
    assert report["engines"][0]["runs"][0]["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]

"""Resets reach the store; what the tier does is seen on vLLM's metrics and KV events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")

from tests.engines.vllm.rig import BLOCK_TOKENS, Engine, Run, prompt, run_engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = prompt(5, 500)
WHOLE_BLOCKS = 500 // BLOCK_TOKENS


def test_a_reset_with_the_connector_reaches_the_store(
    tiny_model: Path, make_tier: Callable[..., dict[str, Any]]
) -> None:
    clearing, keeping = make_tier("lmdb"), make_tier("lmdb") | {"on_reset": "keep"}
    stats = {"disable_log_stats": False, "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    report = run_engines(
        tiny_model,
        [
            Engine(
                runs=[
                    Run([PROMPT], metrics=True),
                    Run([PROMPT], reset="gpu"),
                    Run([PROMPT], reset="connector", tiers=True),
                ],
                tiers=[clearing | {"enable_kv_events": True, "locality": "LOCAL", "revison": "misspelt"}],
                llm=stats,
            ),
            Engine(runs=[Run([PROMPT]), Run([PROMPT], reset="connector", tiers=True)], tiers=[keeping]),
        ],
    )
    cold, after_gpu_reset, after_reset = report["engines"][0]["runs"]
    assert cold["cached"] == [0]
    assert after_gpu_reset["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]
    assert after_reset["cached"] == [0]
    assert after_reset["tiers"][0]["stats"]["cache"]["clears"] == 1

    kept = report["engines"][1]["runs"][1]
    assert kept["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]
    assert kept["tiers"][0]["stats"]["cache"]["hits"] == WHOLE_BLOCKS

    metrics = cold["metrics"]
    assert metrics["vllm:kv_offload_kvstore_store_blocks_total/accepted"] == WHOLE_BLOCKS
    assert metrics["vllm:kv_offload_kvstore_lookups_total/asked"] >= WHOLE_BLOCKS
    assert metrics["vllm:kv_offload_kvstore_health/lmdb"] == 0
    assert cold["events"]["BlockStored/STORAGE"] == WHOLE_BLOCKS
    assert "ignored what it does not know: 'revison'; did you mean 'revision'?" in report["log"]

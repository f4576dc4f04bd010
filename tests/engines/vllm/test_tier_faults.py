"""A thousand requests over a store that fails at random: every one ends, and with the right text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")

from tests.engines.vllm.rig import BLOCK_TOKENS, Engine, Run, prompt, run_engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# In float32 a restored prefix and a computed one differ by less than the margin between two tokens,
# so that texts can be compared whatever was restored.
LLM = {"dtype": "float32", "max_num_seqs": 16, "num_gpu_blocks_override": 64}
ROW_BYTES = 2 * 2 * 2 * BLOCK_TOKENS * 32 * 4  # layers, K and V, heads, tokens, elements, bytes of float32
N_REQUESTS = 1000


def test_a_thousand_requests_over_a_failing_store_end_with_the_right_text(tiny_model: Path) -> None:
    dice = random.Random(7)
    distinct = [
        prompt(seed, dice.randrange(2, 6) * BLOCK_TOKENS + dice.randrange(1, BLOCK_TOKENS)) for seed in range(40)
    ]
    order = [i % len(distinct) for i in range(N_REQUESTS)]
    dice.shuffle(order)
    moody = {"backend": "moody", "capacity": "8MiB", "deadline": "200ms"}
    tier = {"type": "MoodyTier", "module_path": "tests.engines.vllm.faults", "config": {"l2": [moody]}}
    report = run_engines(
        tiny_model,
        [
            Engine(runs=[Run([ids], max_tokens=4) for ids in distinct], llm=LLM),
            Engine(
                runs=[Run([distinct[i] for i in order], max_tokens=4, tiers=True)],
                # Room for fewer blocks than the prompts have: most of what is reused comes from the store.
                cpu_bytes=32 * ROW_BYTES,
                tiers=[tier],
                llm=LLM,
            ),
        ],
        timeout_s=600,
    )
    right = [run["tokens"][0] for run in report["engines"][0]["runs"]]
    run = report["engines"][1]["runs"][0]
    wrong = [i for i, tokens in zip(order, run["tokens"], strict=True) if tokens != right[i]]
    assert not wrong, f"{len(wrong)} of {N_REQUESTS} answers are wrong"

    (counts,) = run["tiers"]
    counters = counts["stats"]["tiers"][0]["counters"]
    print(run["seconds"], counters, counts["lookups"])
    assert counters["hits"] > 0, "nothing was ever restored"
    assert counters["corrupt"] > 0, "nothing was ever damaged"
    assert counters["io_errors"] > 0, "nothing ever failed"

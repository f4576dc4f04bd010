"""Runs one scenario of the connector with real vLLM engines, in a process of its own.

``python -m tests.engines.vllm.connector_child scenario job.json result.json``; the scenarios are the
functions of :mod:`tests.engines.vllm.connector_scenarios`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32


def make_llm(job: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """An engine with the connector over the job's store; ``transfer=None`` for one without."""
    from vllm import LLM

    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": job["config"], **(extra or {})},
        **arguments.pop("transfer", {}),
    }
    if arguments.pop("connector", True):
        arguments["kv_transfer_config"] = transfer
    llm = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": True,
        **arguments,
    }
    return LLM(model=job["model"], **llm)


def end(llm: Any) -> None:
    """Shut an engine down, so that the process can make another one."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def sampling(max_tokens: int) -> Any:
    """Greedy, never ending early."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)


def ask(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> dict[str, Any]:
    """Let an engine answer; says what it took from caches."""
    start_s = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling(max_tokens), use_tqdm=False)
    return {
        "seconds": time.monotonic() - start_s,
        "cached": [output.num_cached_tokens for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def scheduler_of(llm: Any) -> Any:
    """The engine's scheduler, in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_half() -> Any:
    """The worker's half of the connector, in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def store_of() -> Any:
    """The worker's open cache."""
    return worker_half()._cache


def sums() -> dict[str, float]:
    """The worker's sums since the last call; vLLM takes them with every step, so they are added up here."""
    half = worker_half()
    if not hasattr(half, "test_totals"):
        half.test_totals = {}
        take = half.take_tally

        def take_and_add() -> dict[str, float]:
            taken: dict[str, float] = take()
            for name, value in taken.items():
                half.test_totals[name] = half.test_totals.get(name, 0) + value
            return taken

        half.take_tally = take_and_add
    half.take_tally()
    totals: dict[str, float] = dict(half.test_totals)
    half.test_totals.clear()
    return totals


def page_digests(llm: Any) -> dict[str, str]:
    """Digest of the KV bytes of every block in the engine's prefix cache, by block hash."""
    cached = scheduler_of(llm).kv_cache_manager.block_pool.cached_block_hash_to_block
    digests = {}
    for block_hash, blocks in cached._cache.items():
        block = next(iter(blocks.values())) if isinstance(blocks, dict) else blocks
        digests[bytes(block_hash)[:-4].hex()] = _digest(block.block_id)
    return digests


def page_bytes(block_id: int) -> bytes:
    """The bytes of one block over all layers."""
    import torch

    pages = worker_half()._pages
    rows = [pages.layer_rows(i)[block_id].contiguous() for i in range(len(pages.layers))]
    return b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)


def block_ids(llm: Any) -> dict[str, int]:
    """Block of each hash in the engine's prefix cache."""
    cached = scheduler_of(llm).kv_cache_manager.block_pool.cached_block_hash_to_block
    return {
        bytes(h)[:-4].hex(): (next(iter(b.values())) if isinstance(b, dict) else b).block_id
        for h, b in cached._cache.items()
    }


def _digest(block_id: int) -> str:
    return hashlib.sha256(page_bytes(block_id)).hexdigest()


def main() -> None:
    scenario, job, result = sys.argv[1:]
    from tests.engines.vllm import connector_scenarios

    report = getattr(connector_scenarios, scenario)(json.loads(Path(job).read_text()))
    Path(result).write_text(json.dumps(report))
    sys.stdout.flush()
    # The engines have been shut down; what vLLM's libraries do at exit is not ours.
    os._exit(0)


if __name__ == "__main__":
    main()

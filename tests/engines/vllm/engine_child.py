"""Runs vLLM engines in a process of their own: a job in JSON in, what came of it in JSON out.

``python -m tests.engines.vllm.engine_child job.json result.json``; see :mod:`tests.engines.vllm.rig`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["prepare"]:
        module, _, function = job["prepare"].partition(":")
        getattr(importlib.import_module(module), function)()
    start_s = time.monotonic()
    import vllm

    result: dict[str, Any] = {"import_s": time.monotonic() - start_s, "vllm": vllm.__version__, "engines": []}
    for engine in job["engines"]:
        result["engines"].append(_run_engine(job["model"], engine))
        Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    # vLLM's threads and shared memory have been shut down; what its libraries do at exit is not ours.
    os._exit(0)


def _run_engine(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    start_s = time.monotonic()
    llm = LLM(model=model, **engine["llm"])
    result: dict[str, Any] = {"init_s": time.monotonic() - start_s, "runs": []}
    for run in engine["runs"]:
        result["runs"].append(_run(llm, run))
    start_s = time.monotonic()
    llm.llm_engine.engine_core.shutdown()
    result["shutdown_s"] = time.monotonic() - start_s
    del llm
    gc.collect()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    return result


def _run(llm: Any, run: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    if run["reset"]:
        _settle(llm)
        if not llm.reset_prefix_cache(reset_connector=run["reset"] == "connector"):
            msg = "vLLM could not reset its prefix cache"
            raise RuntimeError(msg)
    published = Published()
    if run["metrics"]:
        _scheduler(llm).kv_event_publisher = published
    sampling = SamplingParams(temperature=0, max_tokens=run["max_tokens"], detokenize=False, ignore_eos=True)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in run["prompts"]], sampling, use_tqdm=False)
    seconds = time.monotonic() - start_s
    result: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - start_cpu_s,
        "cached": [output.num_cached_tokens for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    if run["kv"]:
        result["kv"] = _kv_digests(llm)
    if run["tiers"]:
        result["tiers"] = _tier_counts(llm)
    if run["metrics"]:
        _settle(llm)
        # What happened behind a step is reported with a later one, and events come a few times a second.
        deadline_s = time.monotonic() + 10
        while not any("STORAGE" in name for name in published.blocks()) and time.monotonic() < deadline_s:
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
        result["metrics"] = _metrics(llm)
        result["events"] = published.blocks()
    return result


def _metrics(llm: Any) -> dict[str, float]:
    """kvstore's values on the Prometheus registry, by name and label."""
    from prometheus_client import REGISTRY

    labels = ("result", "tier")
    return {
        f"{sample.name}/{next(sample.labels[label] for label in labels if label in sample.labels)}": sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if "kvstore" in sample.name and not sample.name.endswith("_created")
    }


class Published:
    """Stands for vLLM's publisher of KV events and keeps what is published."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        pass

    def blocks(self) -> dict[str, int]:
        """Number of blocks by kind of event and medium."""
        counts: dict[str, int] = {}
        for event in self.events:
            name = f"{type(event).__name__}/{getattr(event, 'medium', None)}"
            counts[name] = counts.get(name, 0) + len(getattr(event, "block_hashes", ()))
        return counts


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _tiers(llm: Any) -> list[Any]:
    connector = _scheduler(llm).connector
    return list(connector.connector_scheduler.manager.secondary_tiers) if connector is not None else []


def _settle(llm: Any) -> None:
    """Step the engine until its tiers have nothing left to do, and the stores have written everything."""
    core = llm.llm_engine.engine_core.engine_core
    deadline_s = time.monotonic() + 60
    while core.scheduler.connector is not None and core.scheduler.connector.has_pending_push_work():
        core.step()
        if time.monotonic() > deadline_s:
            msg = "the tiers are still busy after 60 s"
            raise TimeoutError(msg)
    for tier in _tiers(llm):
        if hasattr(tier, "store"):
            tier.store.cache.flush(30)


def _kv_digests(llm: Any) -> dict[str, str]:
    """Digest of the KV bytes of every block in the engine's prefix cache, by block hash."""
    from tests.engines.vllm.cpu_spec import workers

    cached = _scheduler(llm).kv_cache_manager.block_pool.cached_block_hash_to_block
    digests = {}
    for block_hash, blocks in cached._cache.items():
        block = next(iter(blocks.values())) if isinstance(blocks, dict) else blocks
        digests[bytes(block_hash)[:-4].hex()] = workers[-1].page_digest(block.block_id)
    return digests


def _tier_counts(llm: Any) -> list[Any]:
    counts: list[Any] = []
    for tier in _tiers(llm):
        store = getattr(tier, "store", None)
        if store is None:
            counts.append(None)
            continue
        counts.append({
            "namespace": store.cache.namespace.digest(store.cache.spec).hex(),
            "stats": store.cache.stats().to_dict(),
            "lookups": {
                name: getattr(store.lookups.counters, name) for name in ("remembered", "asked", "gave_up")
            },
        })  # fmt: skip
    return counts


if __name__ == "__main__":
    main()

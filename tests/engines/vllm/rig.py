"""Real vLLM engines for tests and benchmarks, each job in a fresh process.

vLLM itself is imported in the child only.  An engine with a tiny random model takes about 12 CPU
seconds, so that a job with several engines and several runs is cheaper than several jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

ROOT: Final = Path(__file__).resolve().parents[3]
BLOCK_TOKENS: Final = 32

TINY: Final = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "block_size": BLOCK_TOKENS,
    "disable_log_stats": True,
    "prefix_caching_hash_algo": "sha256_cbor",
}
"""Arguments of ``LLM`` for the tiny model."""


@dataclass(frozen=True, slots=True)
class Run:
    """Prompts that an engine answers greedily.

    Attributes:
        prompts: Token ids.
        max_tokens: Tokens to generate for each.
        reset: Before it, forget the engine's own prefix cache; ``"connector"`` also the CPU cache and
            whatever the tiers do then.
        kv: Report a digest of every KV block in the engine's prefix cache afterwards.
        tiers: Report the counters of kvstore tiers afterwards.
        metrics: Report kvstore's Prometheus metrics and the KV events of the tiers afterwards.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int = 8
    reset: Literal["", "gpu", "connector"] = ""
    kv: bool = False
    tiers: bool = False
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine and what it is to do.

    Attributes:
        runs: One after the other.
        tiers: Entries of ``secondary_tiers``; none at all for an engine without offloading.
        cpu_bytes: Size of vLLM's CPU cache.
        extra: More of ``kv_connector_extra_config``.
        transfer: A whole ``kv_transfer_config``, instead of one made from the attributes before.
        llm: Arguments of ``LLM``, over :data:`TINY`.
    """

    runs: Sequence[Run]
    tiers: Sequence[Mapping[str, Any]] = ()
    cpu_bytes: int = 20_000_000
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[str, Any] | None = None
    llm: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        llm = {**TINY, **self.llm}
        transfer = self.transfer
        if transfer is None and self.tiers:
            transfer = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "spec_name": "HostTieringSpec",
                    "spec_module_path": "tests.engines.vllm.cpu_spec",
                    "cpu_bytes_to_use": self.cpu_bytes,
                    "secondary_tiers": [dict(tier) for tier in self.tiers],
                    **self.extra,
                },
            }
        if transfer is not None:
            llm["kv_transfer_config"] = dict(transfer)
        runs = [
            {
                "prompts": [list(ids) for ids in run.prompts],
                "max_tokens": run.max_tokens,
                "reset": run.reset,
                "kv": run.kv,
                "tiers": run.tiers,
                "metrics": run.metrics,
            }
            for run in self.runs
        ]
        return {"llm": llm, "runs": runs}


class EngineError(AssertionError):
    """The child process failed; the message holds the end of its output."""


def run_engines(
    model: Path,
    engines: Sequence[Engine],
    *,
    multiprocess: bool = False,
    timeout_s: float = 300.0,
    prepare: str = "",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run engines one after the other in one fresh process and return what they report.

    Args:
        model: Folder of the model.
        engines: What to run.
        multiprocess: Let vLLM run its core in a process of its own, as ``vllm serve`` does; the engine's
            inside (``kv``, ``tiers``, ``metrics``, ``reset``) is out of reach then.
        timeout_s: Longest time; the child is killed after it.
        prepare: ``"module:function"`` called in the child before vLLM is imported.
        environment: Variables of the child, over this process's and the rig's (which gives the engine one
            thread: say ``OMP_NUM_THREADS`` for a larger model).

    Returns:
        ``{"vllm": version, "import_s": s, "engines": [{"init_s": s, "runs": [...], "shutdown_s": s}]}``;
        a run is ``{"seconds": s, "cpu_seconds": s, "cached": [tokens], "tokens": [[ids]], "kv": {hash: digest}, "tiers": [...]}``.

    Raises:
        EngineError: The child did not end with exit code 0.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-vllm-rig-") as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(
            json.dumps({"model": str(model), "engines": [engine.to_json() for engine in engines], "prepare": prepare})
        )
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # One thread, not bound to a core: on a busy machine OpenMP's barriers cost minutes.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
            **(environment or {}),
        }
        command = [sys.executable, "-m", "tests.engines.vllm.engine_child", str(job), str(result)]
        try:
            child = subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as e:
            tail = (e.stdout or b"").decode(errors="replace")[-3000:] + (e.stderr or b"").decode(errors="replace")[
                -5000:
            ]
            msg = f"the engines did not end within {timeout_s:.0f} s:\n{tail}"
            raise EngineError(msg) from e
        if child.returncode:
            msg = f"exit code {child.returncode}:\n{child.stdout[-3000:]}\n{child.stderr[-8000:]}"
            raise EngineError(msg)
        report: dict[str, Any] = json.loads(result.read_text())
        report["log"] = child.stdout + child.stderr
        return report


def make_tiny_model(folder: Path) -> Path:
    """Write a two-layer Llama with random weights: a real model of 0.5 million parameters, no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompt(seed: int, n_tokens: int) -> list[int]:
    """Token ids that differ from the first one on for different seeds."""
    return [(seed * 131 + i * 7919) % 500 + 3 for i in range(n_tokens)]

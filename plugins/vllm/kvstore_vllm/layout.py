"""What the bytes of one chunk in vLLM's CPU cache are: block spec and layout tag."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import ConfigError
from kvstore.spec import BlockSpec

# The form of a row: for each local rank in order, its pages in vLLM's order; then padding.
_FORMAT: Final = "vllm-row-1"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How chunks are laid out, and for whom.

    Attributes:
        spec: An opaque block of the size of a row.
        tag: Equal exactly when rows of equal size mean the same.
        group_tokens: Tokens per chunk of each KV group.
        prefix_only: Whether a block without the one before it is of no use: one KV group with full
            attention.
    """

    spec: BlockSpec
    tag: str
    group_tokens: tuple[int, ...]
    prefix_only: bool


def layout_of(config: Any, *, row_bytes: int, kv_dtype: str, kernel: str, vllm_config: Any) -> RowLayout:
    """Describe the rows of an engine.

    Args:
        config: vLLM's ``OffloadingConfig``.
        row_bytes: Bytes of a row, padding included.
        kv_dtype: Dtype of the stored elements.
        kernel: Names the attention kernels, which decide how K and V lie in a page.
        vllm_config: vLLM's ``VllmConfig``.
    """
    blocks_per_chunk = config.cache.blocks_per_chunk
    group_tokens = tuple(group.tokens_per_block * blocks_per_chunk for group in config.groups)
    layout = str(getattr(config, "kv_cache_layout", None) or "unknown")
    topology = _topology(config, layout)
    details = {
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": blocks_per_chunk,
        "row_bytes": row_bytes,
        "bytes_per_block": config.worker_kv_bytes_per_block if "tp" in topology else None,
    }
    text = json.dumps(details, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    tag = f"{_FORMAT} {kv_dtype} {layout} {kernel} {topology} {digest}"
    spec = BlockSpec.opaque(row_bytes, block_tokens=group_tokens[0], tag=_FORMAT)
    windowed = getattr(getattr(vllm_config.model_config, "hf_text_config", None), "sliding_window", None) is not None
    return RowLayout(spec, tag, group_tokens, prefix_only=len(group_tokens) == 1 and not windowed)


def _topology(config: Any, layout: str) -> str:
    """Which parallel set-ups have equal bytes, as vLLM's own folders name them, and stricter.

    Canonical rows do not depend on the topology.  Otherwise a row is the ranks' pages one after the
    other, which is independent of the number of ranks only when what they divide (heads, layers) is
    the outermost axis within a page.
    """
    parallel = config.parallel
    portable = bool(parallel.is_parallelism_agnostic)
    if getattr(config, "canonical_layout", False):
        return "canonical" if portable else f"canonical {_ranks(parallel)}"
    if getattr(config, "replicated_layout", False):
        return "replicated"
    axes = layout.replace("B", "")
    if portable and axes.startswith("H") and parallel.pp_size == 1:
        return "heads"
    if portable and axes.startswith("L") and parallel.tp_size == 1:
        return "layers"
    return _ranks(parallel)


def _ranks(parallel: Any) -> str:
    return f"tp{parallel.tp_size}pp{parallel.pp_size}pcp{parallel.pcp_size}dcp{parallel.dcp_size}"


def check_one_host(vllm_config: Any, local_devices: int) -> None:
    """Refuse ranks on several hosts: a row holds the bytes of the ranks of one host only.

    vLLM's CPU cache is shared memory of one host, and the tier lives on the scheduler's: from there
    the other hosts' bytes can neither be read nor written.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        local_devices: Accelerators of this host; 0 when there are none or that is not known.

    Raises:
        ConfigError: The ranks are on several hosts.
    """
    parallel = vllm_config.parallel_config
    hosts = int(getattr(parallel, "nnodes_within_dp", None) or getattr(parallel, "nnodes", 1) or 1)
    world_size = int(getattr(parallel, "world_size", 1))
    ray = getattr(parallel, "distributed_executor_backend", None) == "ray"
    if hosts > 1 or (ray and 0 < local_devices < world_size):
        where = f"{hosts} hosts" if hosts > 1 else f"Ray with {local_devices} accelerators on this host"
        raise ConfigError(
            f"world_size = {world_size} on {where}: vLLM's CPU cache holds the KV of one host's ranks only, so that a "
            "stored block would lack the rest; use KVStoreConnector, whose workers store their own part"
        )

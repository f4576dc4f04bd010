"""Which part of the model's KV a worker holds: which ranks share their blocks, and who writes them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import NotSupportedError
from kvstore.namespace import Namespace
from kvstore.spec import BlockSpec
from kvstore_vllm.identity import ModelIdentity, namespace_of

# The form of a page: one worker's layers in order, each as vLLM's logical [heads, tokens, content].
_FORMAT: Final = "vllm-pages-1"

# Every block of every token stays until the request ends, and one prefix is one list of blocks.
_FULL_ATTENTION: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part of every block.

    Workers with equal ``spec`` and ``namespace`` hold equal bytes and share them.

    Attributes:
        spec: Shape and dtype.
        namespace: Whose KV, which layers and which heads.
        writes: Whether this worker stores it; of those with equal bytes one does.
    """

    spec: BlockSpec
    namespace: Namespace
    writes: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands.

    Attributes:
        rank: Tensor-parallel rank.
        ranks: Tensor-parallel ranks.
        kv_heads: KV heads of the model; 0 when all ranks hold the same KV (MLA).
        layers: Half-open range of the layers of its pipeline stage; None for all.
    """

    rank: int
    ranks: int
    kv_heads: int
    layers: tuple[int, int] | None = None

    @property
    def replicas(self) -> int:
        """Consecutive ranks that hold the same heads."""
        if self.kv_heads == 0:
            return self.ranks
        return max(1, self.ranks // self.kv_heads)

    @property
    def head_range(self) -> tuple[int, int] | None:
        """KV heads that the worker holds; None for all of them."""
        if self.replicas == self.ranks:
            return None
        per_rank = max(1, self.kv_heads // self.ranks)
        start = self.rank // self.replicas * per_rank
        return start, start + per_rank


def place_of(vllm_config: Any) -> Place:
    """Where this worker stands, from its own ``VllmConfig``."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    heads = 0 if getattr(model, "use_mla", False) else model.get_total_num_kv_heads()
    layers = tuple(model.get_layers_start_end_indices(parallel)) if pp > 1 else None
    return Place(parallel.rank % tp, tp, heads, layers)


def shard_of(identity: ModelIdentity, spec: BlockSpec, kernel: str, vllm_config: Any) -> Shard:
    """Describe a worker's part.

    Args:
        identity: Whose KV.
        spec: From the worker's tensors.
        kernel: Names the attention kernels: they decide what the bytes of a page mean.
        vllm_config: The worker's ``VllmConfig``.
    """
    place = place_of(vllm_config)
    layout = f"{_FORMAT} {identity.kv_dtype} {kernel}{_drafts(vllm_config)}"
    namespace = dataclasses.replace(
        namespace_of(identity, engine_layout=layout, vllm_config=vllm_config),
        layers=place.layers,
        kv_heads=place.head_range,
    )
    return Shard(spec, namespace, writes=place.rank % place.replicas == 0)


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what the connector cannot store exactly.

    Raises:
        NotSupportedError: The message says why, and what to use instead.
    """
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise NotSupportedError(
                f"{name} = {size}: the tokens of a block are spread over ranks, which the connector does not "
                "support; use the tier (OffloadingConnector), or 1"
            )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise NotSupportedError(
            f"the model has {len(groups)} KV cache groups; the connector supports one. Start vLLM with "
            "--disable-hybrid-kv-cache-manager, or use the tier (OffloadingConnector)"
        )
    spec = groups[0].kv_cache_spec
    for inner in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values():
        name = type(inner).__name__
        if name not in _FULL_ATTENTION:
            raise NotSupportedError(
                f"the model's KV is a {name}; the connector supports full attention ({', '.join(_FULL_ATTENTION)}), "
                "where every block of a prefix is kept; use the tier (OffloadingConnector)"
            )


def block_tokens_of(kv_cache_config: Any) -> int:
    """Tokens per block, which must be what one block hash stands for.

    Raises:
        NotSupportedError: Hashes of another size.
    """
    block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    per_hash = getattr(kv_cache_config, "hash_block_size", None) or block_tokens
    if per_hash != block_tokens:
        raise NotSupportedError(
            f"vLLM hashes {per_hash} tokens at a time, and its blocks have {block_tokens}; set the block size of the "
            "prefix cache to that of the blocks"
        )
    return block_tokens


def _drafts(vllm_config: Any) -> str:
    """The drafter's layers, whose KV may lie in the same pages."""
    speculative = getattr(vllm_config, "speculative_config", None)
    method = getattr(speculative, "method", None)
    if speculative is None or method in (None, "ngram", "ngram_gpu", "suffix"):
        return ""
    draft = getattr(getattr(speculative, "draft_model_config", None), "model", None) or speculative.model
    return f" draft {method} {draft}"


def in_one_process(vllm_config: Any) -> bool:
    """Whether the only worker lives in the scheduler's process, so that both use one cache."""
    parallel = vllm_config.parallel_config
    return parallel.world_size == 1 and getattr(parallel, "distributed_executor_backend", None) == "uni"

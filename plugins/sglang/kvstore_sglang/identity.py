"""Whose pages these are: the namespace of one host pool on one rank, named by what the bytes hold.

Replicas of the same bytes get the same namespace whichever rank they are on; shards differ by the layers and
heads they hold where those are known, and by rank where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.spec import BlockSpec
from kvstore_sglang.page_format import KV

# Rank-sharded even where the KV is an MLA latent, which every rank has whole (Kimi-Linear and the like).
_ALWAYS_SHARDED: Final = frozenset({"mamba"})
_DRAFT_PREFIX: Final = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the engine's parallel layout this process stands: from ``HiCacheStorageConfig``.

    Attributes:
        tp_rank, tp_size: Tensor parallelism: shards of heads, replicas for MLA.
        pp_rank, pp_size: Pipeline parallelism: shards of layers.
        cp_rank, cp_size: Context parallelism: every rank has a slice of each page.
        dcp_rank, dcp_size: Decode context parallelism: likewise.
        page_tokens: Tokens of a whole page when ``dcp_size`` is above 1.
        replicated: Whether all tensor-parallel ranks hold the same KV (MLA).
        is_writer: Whether this rank writes replicated pools.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    page_tokens: int | None = None
    replicated: bool = False
    is_writer: bool = True

    @classmethod
    def of(cls, storage_config: Any) -> Self:
        """Read SGLang's ``HiCacheStorageConfig``; what a version does not have is 0 of 1."""

        def number(name: str, default: int) -> int:
            return int(getattr(storage_config, name, default))

        replicated = bool(getattr(storage_config, "is_mla_model", False))
        tp_rank, dcp_rank = number("tp_rank", 0), number("dcp_rank", 0)
        return cls(
            tp_rank=tp_rank,
            tp_size=number("tp_size", 1),
            pp_rank=number("pp_rank", 0),
            pp_size=number("pp_size", 1),
            cp_rank=number("attn_cp_rank", 0),
            cp_size=number("attn_cp_size", 1),
            dcp_rank=dcp_rank,
            dcp_size=number("dcp_size", 1),
            page_tokens=getattr(storage_config, "logical_page_size", None),
            replicated=replicated,
            is_writer=bool(getattr(storage_config, "is_storage_writer", not replicated or tp_rank == dcp_rank)),
        )

    def shares(self, pool_name: str) -> bool:
        """Whether the tensor-parallel ranks hold the same bytes of a pool."""
        return self.tp_size == 1 or (self.replicated and pool_name not in _ALWAYS_SHARDED)

    def writes(self, pool_name: str) -> bool:
        """Whether this rank has to write a pool's pages."""
        return self.is_writer or not self.shares(pool_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model this is.

    Attributes:
        name: Model id.
        revision: Which weights.
        text_config: Digest of configuration that changes K.
        kv_scales: Digest of scales of 8-bit KV.
        kv_heads: KV heads of a layer over all ranks; None when not known.
        draft: Which draft model, for the pools that hold its KV; None without speculative decoding.
        engine_version: SGLang's version, for people.
    """

    name: str
    revision: str | None = None
    text_config: str | None = None
    kv_scales: str | None = None
    kv_heads: int | None = None
    draft: str | None = None
    engine_version: str | None = None


def namespace_of(pool: Any, pool_name: str, spec: BlockSpec, place: Place, model: Model) -> Namespace:
    """Name what the pages of a pool hold.

    Raises:
        ConfigError: The model has no name.
    """
    if not model.name:
        msg = "SGLang gave no model name; give 'model' in hicache-storage-backend-extra-config"
        raise ConfigError(msg)
    layers = _layers(pool, pool_name, spec, place)
    kv_heads = _kv_heads(pool_name, spec, place, model)
    scaled = spec.is_opaque or spec.itemsize == 1
    return Namespace(
        model=model.name,
        revision=model.revision,
        text_config=model.text_config,
        kv_scales=model.kv_scales if scaled else None,
        layers=layers,
        kv_heads=kv_heads,
        engine_layout=_layout_tag(pool, pool_name, place, model, covered=(layers is not None, kv_heads is not None)),
        engine="sglang",
        engine_version=model.engine_version,
        rank=place.pp_rank * place.tp_size + place.tp_rank,
        world_size=place.pp_size * place.tp_size,
    )


def _layers(pool: Any, pool_name: str, spec: BlockSpec, place: Place) -> tuple[int, int] | None:
    start, stop = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
    if place.pp_size == 1 or pool_name != KV or spec.is_opaque or start is None or stop is None:
        return None
    return (start, stop) if stop - start == spec.layers else None


def _kv_heads(pool_name: str, spec: BlockSpec, place: Place, model: Model) -> tuple[int, int] | None:
    """The heads of this rank's shard, if it is certain which ones they are.

    One head a rank may mean that several ranks hold the same one (fewer heads than ranks); without the
    model's number of heads that cannot be told apart.
    """
    if place.shares(pool_name) or pool_name != KV or spec.is_opaque:
        return None
    held, ranks = spec.kv_heads, place.tp_size
    total = model.kv_heads
    if total is None and held > 1:
        total = held * ranks
    if total == held * ranks:
        return place.tp_rank * held, (place.tp_rank + 1) * held
    if total and held == 1 and ranks % total == 0:
        head = place.tp_rank // (ranks // total)
        return head, head + 1
    return None


def _layout_tag(pool: Any, pool_name: str, place: Place, model: Model, *, covered: tuple[bool, bool]) -> str | None:
    layers_known, heads_known = covered
    target_layers, layers = getattr(pool, "target_layer_num", None), getattr(pool, "layer_num", None)
    packed = 0 if target_layers is None or layers is None else layers - target_layers
    tags = []
    if pool_name != KV:
        tags.append(f"pool={pool_name}")
    if packed:
        tags.append(f"draft-layers={packed}")
    if packed or pool_name.startswith(_DRAFT_PREFIX):
        tags.append(f"draft={model.draft or 'unknown'}")
    if place.pp_size > 1 and not layers_known:
        tags.append(f"pp={place.pp_rank}/{place.pp_size}")
    if not place.shares(pool_name) and not heads_known:
        tags.append(f"tp={place.tp_rank}/{place.tp_size}")
    if getattr(pool, "_layer_shard_enabled", False):  # each rank of the group keeps some layers only
        tags.append(f"layer-shard={place.tp_rank}/{place.tp_size}")
    if place.cp_size > 1:
        tags.append(f"cp={place.cp_rank}/{place.cp_size}")
    if place.dcp_size > 1:
        tags.append(f"dcp={place.dcp_rank}/{place.dcp_size}/page={place.page_tokens}")
    return "sglang " + " ".join(tags) if tags else None

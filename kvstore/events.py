"""Facts that observers (metrics, routers) receive in batches from a background thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventKind = Literal["stored", "removed", "hit", "miss", "corrupt", "tier"]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One thing that happened to blocks of one cache.

    Attributes:
        kind: What happened.
        cache_id: Which open cache, as in :attr:`CacheInfo.cache_id`.
        tier: ``"l1"`` or the tier's name.
        digests: The blocks concerned, 32 bytes each; empty for ``"tier"`` events.
        detail: Short text, such as the tier's new state.
    """

    kind: EventKind
    cache_id: str
    tier: str
    digests: tuple[bytes, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """An open cache, as observers see it.

    Attributes:
        cache_id: Unique within the process.
        namespace: 16 bytes, hex.
        tiers: Tier names in lookup order, ``"l1"`` first when it is enabled.
        block_tokens: Tokens per block.
        block_bytes: Bytes per block.
    """

    cache_id: str
    namespace: str
    tiers: tuple[str, ...]
    block_tokens: int
    block_bytes: int

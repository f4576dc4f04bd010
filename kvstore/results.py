"""What data calls return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a key could be restored right now; advisory, nothing is pinned.

    Attributes:
        blocks: Leading blocks present in any tier.
        tokens: ``blocks`` times the block size.
        by_tier: Of these, how many each tier would deliver, in lookup order (``"l1"`` first).
    """

    blocks: int
    tokens: int
    by_tier: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __bool__(self) -> bool:
        return self.blocks > 0

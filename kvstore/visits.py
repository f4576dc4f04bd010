"""What a read does at the door of each tier: whether loading is worth it, or was promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.served import Served
    from kvstore.stack import OpenTier, Stack


def admitted(stack: Stack, open_tier: OpenTier, served: Served, start: int, stop: int | None = None) -> bool:
    """Whether to read ``key[start:stop]`` from a tier; if not, that is noted in ``served``."""
    name, key = open_tier.tier.name, served.key
    if stack.gate.admits(name, key, start, stop) or stack.gate.told(name, key, start) > start:
        return True
    served.note_gated(name, range(start, len(key) if stop is None else stop))
    return False


def admitted_each(stack: Stack, open_tier: OpenTier, served: Served, wanted: list[int]) -> list[int]:
    """Which of some independent blocks to read from a tier; the others are noted in ``served``."""
    name, key = open_tier.tier.name, served.key
    if stack.gate.admits_each(name, key, len(wanted)):
        return wanted
    told = stack.gate.told(name, key)
    served.note_gated(name, (i for i in wanted if i >= told))
    return [i for i in wanted if i < told]

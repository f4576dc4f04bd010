"""Which law must notice which broken backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from kvstore.backend import Backend

B = TypeVar("B", bound=type[Backend])

CATCHES: Final[dict[type[Backend], tuple[str, ...]]] = {}
"""Broken backend to the laws that it must fail."""


def fails(*laws: str) -> Callable[[B], B]:
    """Say which laws notice a backend."""

    def enter(broken: B) -> B:
        CATCHES[broken] = tuple(f"test_{law}" for law in laws)
        return broken

    return enter

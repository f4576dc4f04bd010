"""What happens in the store's tiers, told back in vLLM's keys."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kvstore.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvstore.events import CacheEvent
    from kvstore.plugins import Registry

# Blocks whose offload key is remembered, about 250 bytes each; what is forgotten is not reported.
_LIMIT: Final = 1 << 17

_numbers: Final = itertools.count(1)


class KnownBlocks:
    """Offload keys by the digest of their block; thread-safe, the oldest are forgotten first."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._keys: dict[bytes, bytes] = {}

    def note(self, digests: Sequence[bytes], offload_keys: Sequence[bytes]) -> None:
        """Remember what a digest is called in vLLM."""
        with self._lock:
            self._keys.update(zip(digests, offload_keys, strict=True))
            while len(self._keys) > self._limit:
                del self._keys[next(iter(self._keys))]

    def of(self, digests: Sequence[bytes]) -> list[bytes]:
        """The offload keys of those that are known."""
        with self._lock:
            return [self._keys[digest] for digest in digests if digest in self._keys]


def observe(registry: Registry, notice: Callable[[Sequence[CacheEvent]], None]) -> None:
    """Have ``notice`` called with the events of caches that are opened with the registry from now on.

    It is called from a background thread of a cache, a few times a second at most.
    """
    module = ModuleType(f"kvstore_vllm_observer_{next(_numbers)}")

    @hookimpl
    def kvstore_events(events: Sequence[CacheEvent]) -> None:
        notice(events)

    module.kvstore_events = kvstore_events  # type: ignore[attr-defined]  # a module made here
    registry.register(module, module.__name__.replace("_", "-"))

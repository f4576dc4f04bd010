"""Caches over several counting tiers, opened from one description, for the tests of the tier stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.backend import Backend, BatchShape, PutItem
from kvstore.hookspecs import hookimpl
from kvstore.l1.cache import L1Cache
from kvstore.l2.counters import TierCounters
from kvstore.plugins import BackendPlugin, Registry
from kvstore.stack import Stack
from kvstore.types import Call, PutStatus
from tests import doubles


class ShapedBackend(doubles.CountingBackend):
    """Wants its batches in a shape and remembers how they came."""

    shape = BatchShape()

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []  # positions, in the order of the call

    def batch_shape(self) -> BatchShape:
        return self.shape

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        self.batches.append([item.hint.position for item in items])
        return super().put_many(items, call)


@dataclass
class Layers:
    """An open cache and the doubles below it, by tier name."""

    cache: KVCache
    backends: dict[str, Any] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        assert self.cache._state is not None
        return self.cache._state.stack

    @property
    def l1(self) -> L1Cache:
        assert self.stack.l1 is not None
        return self.stack.l1

    def counters(self, tier: str) -> TierCounters:
        return next(t.counters for t in self.cache.stats().tiers if t.name == tier)

    def holds(self, tier: str, key: KVCacheKey) -> list[bool]:
        """Which blocks of a key the medium holds, asked behind the cache's back."""
        stored = {name[17:] for name in self.backends[tier]._records}
        return [digest in stored for digest in key.digests]

    def leads(self, tier: str, key: KVCacheKey) -> int:
        """How many leading blocks of a key the medium holds."""
        return [*self.holds(tier, key), False].index(False)

    def drop(self, tier: str, digests: Sequence[bytes]) -> None:
        backend = self.backends[tier]
        for name in [n for n in backend._records if n[17:] in set(digests)]:
            backend._remove(name)


def open_layers(
    spec: BlockSpec, l1: dict[str, Any], tiers: dict[str, tuple[Backend, dict[str, Any]]], *, max_writers: int = 1
) -> Layers:
    """Open a cache over given backends, each with its tier settings, in the order of the mapping."""
    registry = Registry.discover()
    l2 = []
    for number, (name, (backend, settings)) in enumerate(tiers.items()):
        plugin = f"layer-{number}"
        _register(registry, plugin, backend, max_writers)
        l2.append({"backend": plugin, "name": name, **settings})
    cache = KVCache.open(
        {"l1": l1, "l2": l2}, spec=spec, namespace=Namespace(model="test/model", revision="r1"), registry=registry
    )
    return Layers(cache, {name: backend for name, (backend, _) in tiers.items()})


def _register(registry: Registry, name: str, backend: Backend, max_writers: int) -> None:
    module = ModuleType(f"hooks_of_{name.replace('-', '_')}_{id(backend)}")

    @hookimpl
    def kvstore_register_backends() -> list[BackendPlugin]:
        return [
            BackendPlugin(
                name=name,
                options=doubles.NoOptions,
                factory=lambda: backend,
                summary="a double",
                default_codec="none",
                max_writers=max_writers,
            )
        ]

    module.kvstore_register_backends = kvstore_register_backends  # type: ignore[attr-defined]
    registry.register(module, name)


def slots(spec: BlockSpec, n: int) -> dict[str, Any]:
    """An L1 of exactly ``n`` blocks."""
    return {"capacity": n * (-(-spec.nbytes // 4096) * 4096 + 4096)}

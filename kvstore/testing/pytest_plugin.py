"""Fixtures for tests of plugins, opt-in: ``pytest_plugins = ["kvstore.testing.pytest_plugin"]``.

It also lists at the end of a run which laws of a conformance suite were replaced with
:func:`~kvstore.testing.deviates`, and marks those tests ``kvstore_deviation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.backend import Backend
from kvstore.plugins import Registry
from kvstore.testing.deviations import deviation
from kvstore.testing.store import Store, Target

OpenStore = Callable[..., Store]
OpenCache = Callable[..., KVCache]
OpenBackend = Callable[..., Backend]

_DEVIATIONS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker."""
    config.addinivalue_line("markers", "kvstore_deviation: replaces a law of a kvstore conformance suite")
    config.stash[_DEVIATIONS] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark and remember tests that deviate."""
    for item in items:
        reason = deviation(getattr(item, "obj", None))
        if reason:
            item.add_marker("kvstore_deviation")
            config.stash[_DEVIATIONS].append(f"{item.nodeid}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List deviations, so that a green run does not hide them."""
    found = config.stash[_DEVIATIONS]
    if found:
        terminalreporter.section("laws that a kvstore plugin deviates from")
        for line in found:
            terminalreporter.line(line)


@pytest.fixture
def kvstore_registry() -> Registry:
    """A registry of the installed plugins, for this test alone."""
    return Registry.discover()


@pytest.fixture
def kvstore_spec() -> BlockSpec:
    """A small block of 16 tokens: 8 KiB."""
    return BlockSpec(layers=2, kv_heads=2, head_dim=32, block_tokens=16, dtype="bfloat16")


@pytest.fixture
def kvstore_namespace() -> Namespace:
    """A namespace with a revision."""
    return Namespace(model="test/model", revision="r1")


@pytest.fixture
def kvstore_store(kvstore_registry: Registry) -> Iterator[OpenStore]:
    """``kvstore_store("mine", path="...")``: a place of a plugin; its backends are closed after the test."""
    made: list[Store] = []

    def make(plugin: str, **options: Any) -> Store:
        made.append(Store(Target(plugin, options), kvstore_registry))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def kvstore_backend(kvstore_store: OpenStore) -> OpenBackend:
    """``kvstore_backend("mine", path="...")``: an opened backend, closed after the test."""

    def open_one(plugin: str, **options: Any) -> Backend:
        return kvstore_store(plugin, **options).open()

    return open_one


@pytest.fixture
def kvstore_cache(
    kvstore_registry: Registry, kvstore_spec: BlockSpec, kvstore_namespace: Namespace
) -> Iterator[OpenCache]:
    """``kvstore_cache("mine", path="...")``: a cache without L1 over one tier, closed after the test.

    Keywords are the tier's keys, the core's own (``codec``, ``capacity``) among them.
    """
    opened: list[KVCache] = []

    def open_one(backend: str, **tier: Any) -> KVCache:
        config = {"l1": {"enabled": False}, "l2": [{"backend": backend, **tier}]}
        cache = KVCache.open(config, spec=kvstore_spec, namespace=kvstore_namespace, registry=kvstore_registry)
        opened.append(cache)
        return cache

    yield open_one
    for cache in opened:
        cache.close()

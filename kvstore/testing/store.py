"""One place of one backend plugin, opened as often and in as many processes as a law asks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.backend import Backend, BackendContext, Capability
from kvstore.config import load_config
from kvstore.plugins import BackendPlugin, Registry
from kvstore.testing.neighbour import Neighbour


@dataclass(frozen=True, slots=True)
class Target:
    """What is tested, in a form that another process can be told.

    Attributes:
        plugin: Plugin name.
        options: Its config keys as a TOML file would hold them.
        hooks: Module to register when no installed distribution provides the plugin; empty otherwise.
        capacity_bytes: Budget of every open that says nothing else.
    """

    plugin: str
    options: Mapping[str, Any]
    hooks: str = ""
    capacity_bytes: int = 256 << 20

    def registry(self) -> Registry:
        """Return a registry that knows the plugin."""
        return _registry(self.plugin, self.hooks, tuple(sys.path))

    def tier(self, **changes: Any) -> dict[str, Any]:
        """An ``[[l2]]`` section for the place."""
        section = {"backend": self.plugin, "capacity": self.capacity_bytes, "codec": "none", "admit": "all"}
        return {**section, **self.options, **changes}


@functools.lru_cache(maxsize=8)
def _registry(plugin: str, hooks: str, path: tuple[str, ...]) -> Registry:
    del path  # decides what is installed, so it is part of the cache's key
    registry = Registry.discover()
    if hooks and plugin not in registry.names():
        registry.register(importlib.import_module(hooks), plugin)
    return registry


@dataclass(slots=True)
class Store:
    """Opens the backend under test and closes whatever a test left open.

    Attributes:
        target: What is tested.
        registry: Knows the plugin.
        removed: Names that opened backends reported as evicted.
    """

    target: Target
    registry: Registry
    removed: list[bytes] = field(default_factory=list)
    _declared: Capability | None = None
    _opened: list[Backend] = field(default_factory=list)
    _neighbours: list[Neighbour] = field(default_factory=list)

    @property
    def plugin(self) -> BackendPlugin:
        """The descriptor."""
        return self.registry.backend(self.target.plugin)

    def has(self, capability: Capability) -> bool:
        """Whether the backend declares all of ``capability`` once it is open."""
        if self._declared is None:
            with self.opened():
                pass
        return self._declared is not None and capability in self._declared

    def make(self) -> Backend:
        """Make an unopened backend; that it fulfils the contract's signatures is a law of its own."""
        return self.plugin.factory()

    def context(self, **changes: Any) -> BackendContext:
        """What an open is given; the options are read from config as a cache would."""
        config = load_config({"l1": {"enabled": False}, "l2": [self.target.tier()]}, self.registry)
        context = BackendContext(
            tier="under-test",
            options=config.l2[0].options,
            capacity_bytes=self.target.capacity_bytes,
            namespace=bytes(range(16)),
            namespace_json='{"model": "test/model"}',
            removed=self._note_removed,
            block_bytes=5000,
        )
        return dataclasses.replace(context, **changes)

    def open(self, **changes: Any) -> Backend:
        """Open the place; ``changes`` are fields of the context.  Closed after the test."""
        backend = self.make()
        self._opened.append(backend)
        backend.open(self.context(**changes))
        self._declared = backend.capabilities
        return backend

    @contextlib.contextmanager
    def opened(self, **changes: Any) -> Iterator[Backend]:
        """Open the place for a while."""
        backend = self.open(**changes)
        try:
            yield backend
        finally:
            backend.close()

    def neighbour(self, **changes: Any) -> Neighbour:
        """Start another process with the place opened; ends after the test.

        Args:
            changes: ``capacity_bytes``, ``durability`` or ``read_only`` of its context.
        """
        started = Neighbour(dataclasses.asdict(self.target), changes)
        self._neighbours.append(started)
        return started

    def _note_removed(self, names: Sequence[bytes]) -> None:
        self.removed.extend(names)

    def close(self) -> None:
        """Close every backend and end every process."""
        for neighbour in self._neighbours:
            neighbour.end()
        for backend in self._opened:
            backend.close()

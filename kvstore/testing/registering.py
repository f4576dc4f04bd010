"""Backends of a test under names that configs can use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from kvstore.backend import Backend
from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin, Registry

_numbers: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For backends that take none."""


def register_backend(
    factory: Callable[[], Backend],
    registry: Registry | None = None,
    *,
    name: str = "",
    options: type[Any] = NoOptions,
    max_writers: int = 1,
) -> tuple[Registry, str]:
    """Let a plugin name stand for ``factory`` in a registry.

    Args:
        factory: Makes an unopened backend; may return the same one again when a test wants to look into it.
        registry: Where to register; None makes a new one of the installed plugins.
        name: The plugin name; a new one by default.
        options: As in :class:`~kvstore.plugins.BackendPlugin`.
        max_writers: As in :class:`~kvstore.plugins.BackendPlugin`.

    Returns:
        The registry, for ``KVCache.open(..., registry=...)``, and the name, for ``backend = ...``.
    """
    registry = registry or Registry.discover()
    name = name or f"double-{next(_numbers)}"
    plugin = BackendPlugin(
        name=name,
        options=options,
        factory=factory,
        summary="Made by a test",
        default_codec="none",
        max_writers=max_writers,
    )

    @hookimpl
    def kvstore_register_backends() -> list[BackendPlugin]:
        return [plugin]

    module = ModuleType(f"hooks_of_{name.replace('-', '_')}")
    module.kvstore_register_backends = kvstore_register_backends  # type: ignore[attr-defined]  # a module made here
    registry.register(module, name)
    return registry, name

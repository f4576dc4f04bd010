"""kvstore: the storage layer for LLM KV cache.

Public names are resolved on first use (PEP 562), so that ``import kvstore`` costs nothing: torch,
numpy and storage drivers are imported when a cache is opened, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore.cache import KVCache
    from kvstore.config import Config, DefaultsConfig, L1Config, TierConfig
    from kvstore.errors import (
        BackendError,
        BackendFullError,
        BackendPermissionError,
        BackendTimeoutError,
        BackendUnavailableError,
        CapacityError,
        ClosedError,
        ConfigError,
        CorruptRecordError,
        DeadlineError,
        KeyMismatchError,
        KVStoreError,
        NotSupportedError,
        PluginConflictError,
        PluginError,
        PluginIncompatibleError,
        PluginLoadError,
        PluginNotFoundError,
        SpecMismatchError,
        UnknownKeyError,
    )
    from kvstore.hookspecs import hookimpl
    from kvstore.keys import BlockExtra, BlockHashKey, KVCacheKey, TokenKey
    from kvstore.namespace import Namespace
    from kvstore.results import Lookup
    from kvstore.spec import BlockSpec
    from kvstore.stats import Health, Stats
    from kvstore.types import BlockStatus, Presence

__version__: Final = "0.1.0"

_HOME: Final[dict[str, str]] = {
    "BlockExtra": "kvstore.keys",
    "BlockHashKey": "kvstore.keys",
    "BlockSpec": "kvstore.spec",
    "BlockStatus": "kvstore.types",
    "Config": "kvstore.config",
    "DefaultsConfig": "kvstore.config",
    "Health": "kvstore.stats",
    "KVCache": "kvstore.cache",
    "KVCacheKey": "kvstore.keys",
    "L1Config": "kvstore.config",
    "Lookup": "kvstore.results",
    "Namespace": "kvstore.namespace",
    "Presence": "kvstore.types",
    "Stats": "kvstore.stats",
    "TierConfig": "kvstore.config",
    "TokenKey": "kvstore.keys",
    "hookimpl": "kvstore.hookspecs",
} | dict.fromkeys(
    (
        "BackendError",
        "BackendFullError",
        "BackendPermissionError",
        "BackendTimeoutError",
        "BackendUnavailableError",
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "CorruptRecordError",
        "DeadlineError",
        "KVStoreError",
        "KeyMismatchError",
        "NotSupportedError",
        "PluginConflictError",
        "PluginError",
        "PluginIncompatibleError",
        "PluginLoadError",
        "PluginNotFoundError",
        "SpecMismatchError",
        "UnknownKeyError",
    ),
    "kvstore.errors",
)

__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605 - one table says each public name once


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        msg = f"module 'kvstore' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

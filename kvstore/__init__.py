"""kvstore: the storage layer for LLM KV cache.

Public names are resolved on first use (PEP 562), so that ``import kvstore`` costs nothing: torch,
numpy and storage drivers are imported when a cache is opened, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore.cache import KVCache
    from kvstore.config import Config, DefaultsConfig, GateConfig, L1Config, TierConfig
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
    from kvstore.explain import BlockReport, Cause, TierReport
    from kvstore.heads import HeadCache
    from kvstore.hookspecs import hookimpl
    from kvstore.keys import BlockExtra, BlockHashKey, KVCacheKey, TokenKey
    from kvstore.l1.lease import Lease
    from kvstore.l1.reservation import Reservation
    from kvstore.namespace import Namespace
    from kvstore.paged import PagedBlocks
    from kvstore.plugins import Registry
    from kvstore.results import Lookup
    from kvstore.spec import BlockSpec
    from kvstore.stats import Health, Stats
    from kvstore.stream import LayerGroup
    from kvstore.transfer import Transfer
    from kvstore.types import BlockStatus, Presence

__version__: Final = "0.1.0"

__all__ = [
    "BackendError",
    "BackendFullError",
    "BackendPermissionError",
    "BackendTimeoutError",
    "BackendUnavailableError",
    "BlockExtra",
    "BlockHashKey",
    "BlockReport",
    "BlockSpec",
    "BlockStatus",
    "CapacityError",
    "Cause",
    "ClosedError",
    "Config",
    "ConfigError",
    "CorruptRecordError",
    "DeadlineError",
    "DefaultsConfig",
    "GateConfig",
    "HeadCache",
    "Health",
    "KVCache",
    "KVCacheKey",
    "KVStoreError",
    "KeyMismatchError",
    "L1Config",
    "LayerGroup",
    "Lease",
    "Lookup",
    "Namespace",
    "NotSupportedError",
    "PagedBlocks",
    "PluginConflictError",
    "PluginError",
    "PluginIncompatibleError",
    "PluginLoadError",
    "PluginNotFoundError",
    "Presence",
    "Registry",
    "Reservation",
    "SpecMismatchError",
    "Stats",
    "TierConfig",
    "TierReport",
    "TokenKey",
    "Transfer",
    "UnknownKeyError",
    "__version__",
    "hookimpl",
]

_MODULES: Final[dict[str, tuple[str, ...]]] = {
    "kvstore.cache": ("KVCache",),
    "kvstore.config": ("Config", "DefaultsConfig", "GateConfig", "L1Config", "TierConfig"),
    "kvstore.explain": ("BlockReport", "Cause", "TierReport"),
    "kvstore.heads": ("HeadCache",),
    "kvstore.hookspecs": ("hookimpl",),
    "kvstore.keys": ("BlockExtra", "BlockHashKey", "KVCacheKey", "TokenKey"),
    "kvstore.l1.lease": ("Lease",),
    "kvstore.l1.reservation": ("Reservation",),
    "kvstore.namespace": ("Namespace",),
    "kvstore.paged": ("PagedBlocks",),
    "kvstore.plugins": ("Registry",),
    "kvstore.results": ("Lookup",),
    "kvstore.spec": ("BlockSpec",),
    "kvstore.stats": ("Health", "Stats"),
    "kvstore.stream": ("LayerGroup",),
    "kvstore.transfer": ("Transfer",),
    "kvstore.types": ("BlockStatus", "Presence"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module 'kvstore' has no attribute {name!r}"
        raise AttributeError(msg)
    home = next((module for module, names in _MODULES.items() if name in names), "kvstore.errors")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

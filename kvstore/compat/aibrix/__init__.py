"""AIBrix KVCache's public names over kvstore.

Code that was written for ``aibrix_kvcache`` imports them from here, or finds them under that name
after :func:`install`::

    import kvstore.compat.aibrix
    from kvstore import Namespace

    kvstore.compat.aibrix.install("kvstore.toml", namespace=Namespace(model="...", revision="..."))

The interface followed is that of AIBrix KVCache 0.8.0.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvstore.compat.aibrix import installing, logs
from kvstore.compat.aibrix.cache import AibrixCache
from kvstore.compat.aibrix.grouped import AibrixGroupCache
from kvstore.compat.aibrix.handles import GDRKVCacheHandle, KVCacheHandle, MemoryRegionKVCacheHandle
from kvstore.compat.aibrix.interface import CacheInterface
from kvstore.compat.aibrix.metrics import (
    MS_BUCKETS,
    TOKEN_BUCKETS,
    KVCacheMetrics,
    KVCacheMetricsExporter,
    Metrics,
    OpMetrics,
)
from kvstore.compat.aibrix.regions import ExternalMemoryRegion, ManagedMemoryRegion, MemoryRegion, RefCountedObj
from kvstore.compat.aibrix.settings import HashMeaning, configure
from kvstore.compat.aibrix.spec import (
    KVCacheBlockLayout,
    KVCacheBlockSpec,
    KVCacheConfig,
    KVCacheFeature,
    KVCacheTensorSpec,
    ModelSpec,
)
from kvstore.compat.aibrix.status import Status, StatusCodes
from kvstore.compat.aibrix.views import BlockHashes, KVCacheIds, KVCacheKey, KVCacheKeyTypes, TokenListView

if TYPE_CHECKING:
    from kvstore import Namespace
    from kvstore.config import ConfigSource

KVCacheManager = CacheInterface
BaseKVCacheManager = AibrixCache
GroupAwareKVCacheManager = AibrixGroupCache

__version__: Final = "0.8.0+kvstore"
__version_tuple__: Final = (0, 8, 0, "kvstore")

__all__ = [
    "BaseKVCacheManager",
    "BlockHashes",
    "ExternalMemoryRegion",
    "GDRKVCacheHandle",
    "GroupAwareKVCacheManager",
    "KVCacheBlockLayout",
    "KVCacheBlockSpec",
    "KVCacheConfig",
    "KVCacheHandle",
    "KVCacheKey",
    "KVCacheManager",
    "KVCacheMetrics",
    "KVCacheTensorSpec",
    "MemoryRegion",
    "MemoryRegionKVCacheHandle",
    "ModelSpec",
    "Status",
    "StatusCodes",
    "TokenListView",
    "configure",
    "install",
    "uninstall",
]

_MODULES: Final[dict[str, dict[str, Any]]] = {
    "": {name: globals()[name] for name in __all__ if name[0].isupper()}
    | {"__version__": __version__, "__version_tuple__": __version_tuple__},
    "cache_handle": {c.__name__: c for c in (GDRKVCacheHandle, KVCacheHandle, MemoryRegionKVCacheHandle)},
    "cache_hashable": {c.__name__: c for c in (BlockHashes, KVCacheIds, KVCacheKey, TokenListView)}
    | {"KVCacheKeyTypes": KVCacheKeyTypes},
    "cache_manager": {
        "BaseKVCacheManager": BaseKVCacheManager,
        "GroupAwareKVCacheManager": GroupAwareKVCacheManager,
        "KVCacheFeature": KVCacheFeature,
        "KVCacheManager": KVCacheManager,
    },
    "common": {},
    "common.absl_logging": {
        "getLogger": logging.getLogger,
        "log_every_n_seconds": logs.log_every_n_seconds,
        "log_if": logs.log_if,
    },
    "config": {"KVCacheConfig": KVCacheConfig},
    "memory": {c.__name__: c for c in (ExternalMemoryRegion, ManagedMemoryRegion, MemoryRegion, RefCountedObj)},
    "metrics": {c.__name__: c for c in (KVCacheMetrics, KVCacheMetricsExporter, Metrics, OpMetrics)}
    | {"MS_BUCKETS": MS_BUCKETS, "TOKEN_BUCKETS": TOKEN_BUCKETS},
    "spec": {c.__name__: c for c in (KVCacheBlockLayout, KVCacheBlockSpec, KVCacheTensorSpec, ModelSpec)},
    "status": {"Status": Status, "StatusCodes": StatusCodes},
    "version": {"__version__": __version__, "__version_tuple__": __version_tuple__},
}
"""What AIBrix's modules are, as far as engines import them."""


def install(
    config: ConfigSource | None = None,
    *,
    namespace: Namespace | None = None,
    block_hashes: HashMeaning = "chained",
) -> None:
    """Make ``import aibrix_kvcache`` find these classes, in this process; then :func:`configure`.

    Call it before anything imports ``aibrix_kvcache``.  Installed once, it can be called again to
    configure anew.

    Args:
        config: See :func:`configure`, like the others.
        namespace: See there.
        block_hashes: See there.

    Raises:
        PluginConflictError: Another ``aibrix_kvcache`` has been imported.
    """
    installing.put_in_place(_MODULES)
    configure(config, namespace=namespace, block_hashes=block_hashes)


def uninstall() -> None:
    """Undo :func:`install`; classes that were imported meanwhile go on working."""
    installing.take_away()

"""The storage backend that SGLang loads: ``--hicache-storage-backend dynamic``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvstore.engines.store_config import load_store_config
from kvstore.plugins import Registry
from kvstore_sglang.hits import PoolQuery
from kvstore_sglang.identity import Place
from kvstore_sglang.options import Options
from kvstore_sglang.page_format import KV
from kvstore_sglang.page_store import PageRun, PageStore
from kvstore_sglang.pool_store import PageKeys
from kvstore_sglang.running_server import running_model

logger: Final = logging.getLogger(__name__)


class KVStoreHiCache(HiCacheStorage):
    """Keeps HiCache pages in kvstore's tiers and gives them back bit for bit, or not at all.

    SGLang makes one per rank, registers its host pools and then calls from its query, prefetch and backup
    threads.  What is not there, damaged or late is a miss: a shorter prefix, which SGLang recomputes.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``; ``extra_config`` holds our options.
        kwargs: What SGLang passes besides; nothing so far.

    Raises:
        ConfigError: The store's config or one of our options is wrong.
        PluginError: The config names a plugin that cannot be used.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if kwargs:
            logger.info("SGLang passes %s, which kvstore does not use", ", ".join(sorted(kwargs)))
        options = Options.read(storage_config.extra_config)
        registry = Registry.discover()
        self._store = PageStore(
            load_store_config(options.config, registry, salt=options.salt),
            registry,
            Place.of(storage_config),
            running_model(options, storage_config.model_name),
            options.salt,
        )

    # -- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for the KV pool.

        Raises:
            NotSupportedError: The pool's pages cannot be stored.
            BackendError: A required tier cannot be opened.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._store.add_pool(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the store for one more pool of a hybrid model.

        Raises:
            NotSupportedError: The pool's pages cannot be stored.
            BackendError: A required tier cannot be opened.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._store.add_pool(str(host_pool_name), host_pool)

    # -- pages as tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The KV page of a key in ``target_location``, or in a new flat tensor; None for a miss."""
        del target_sizes  # a tensor knows its size
        return self._store.get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Leading KV pages in the tensors given, or in new flat ones; None from the first miss on."""
        del target_sizes
        return self._store.get(keys, target_locations)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store the KV page of a key; true when it was accepted."""
        page = target_location if value is None else value
        return self.batch_set([key], [page], None, target_sizes)

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store KV pages; true when all were accepted."""
        del target_sizes
        return self._store.set(keys, target_locations if values is None else values)

    def exists(self, key: str) -> bool:
        """Whether the KV page of a key is stored."""
        return self._store.count(KV, PageKeys([key])) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading KV pages are stored."""
        return self._store.count(KV, _page_keys(keys, extra_info))

    # -- pages in the KV pool

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Bring KV pages into the host pool; true for the leading ones that were there."""
        return self._store.load(KV, PageRun(_page_keys(keys, extra_info), host_indices))

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store KV pages of the host pool; true for the leading ones that were accepted."""
        return self._store.save(KV, PageRun(_page_keys(keys, extra_info), host_indices))

    # -- pages in any pool, for hybrid models

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """How far KV and the other pools together can restore a prefix: a ``PoolTransferResult``."""
        queries = [_query(transfer) for transfer in pool_transfers or ()]
        found = self._store.restorable(_page_keys(keys, extra_info), queries)
        return PoolTransferResult(found.kv_pages, found.by_pool, found.lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Bring pages into their pools; for each pool, true for the leading ones that were there."""
        return self._each_pool(transfers, extra_info, self._store.load)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of their pools; for each pool, true for the leading ones that were accepted."""
        return self._each_pool(transfers, extra_info, self._store.save)

    def _each_pool(
        self, transfers: Sequence[Any], extra_info: Any, move: Callable[[str, PageRun], list[bool]]
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: move(
                str(transfer.name), PageRun(_page_keys(transfer.keys or [], extra_info), transfer.host_indices)
            )
            for transfer in transfers
        }

    # -- upkeep

    def clear(self) -> None:
        """Forget all pages of this model, on every host that shares the tiers."""
        self._store.clear()

    def get_stats(self) -> Any:
        """Pages and speed of the transfers since the last call, as SGLang's ``StorageMetrics``."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loads, saves = self._store.transfers.drain()
        return StorageMetrics(
            prefetch_pgs=[load.n_pages for load in loads],
            backup_pgs=[save.n_pages for save in saves],
            prefetch_bandwidth=[load.gigabytes_per_s for load in loads],
            backup_bandwidth=[save.gigabytes_per_s for save in saves],
        )

    def kvstore_stats(self) -> dict[str, dict[str, Any]]:
        """Counters of kvstore itself, one entry per host pool."""
        return self._store.stats()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every page accepted so far is stored, refused or dropped.

        Raises:
            DeadlineError: A tier did not get there in time.
        """
        self._store.flush(timeout_s)

    def close(self) -> None:
        """Write out what is queued and release everything; later calls are misses."""
        self._store.close()


def _page_keys(keys: Sequence[str], extra_info: Any) -> PageKeys:
    return PageKeys(keys, getattr(extra_info, "prefix_keys", None))


def _query(transfer: Any) -> PoolQuery:
    return PoolQuery(
        str(transfer.name),
        str(getattr(transfer.hit_policy, "value", transfer.hit_policy)),
        transfer.keys or (),
        getattr(transfer, "block_pages", 0),
        getattr(transfer, "group_pages", 0),
    )

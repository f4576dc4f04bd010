"""Everything SGLang stores on one rank: a cache per host pool over one set of tiers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvstore import KVCache
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.plugins import Registry
from kvstore_sglang.hits import PoolQuery, Restorable, restorable
from kvstore_sglang.host_pages import HostPages, as_block
from kvstore_sglang.identity import Model, Place, namespace_of
from kvstore_sglang.page_format import KV, is_logical, page_spec
from kvstore_sglang.pool_store import PageKeys, PoolStore
from kvstore_sglang.transfer_log import Transfer, TransferLog

logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of a host pool and their keys: one batch of a transfer.

    Attributes:
        keys: Their hashes.
        host_indices: ``(len(keys) * indices_per_page,)``; None when SGLang could not resolve them.
    """

    keys: PageKeys
    host_indices: torch.Tensor | None


class PageStore:
    """Stores and restores pages of host pools.

    Pools become known one by one; a call about one that is not known is a miss.  Thread-safe: SGLang asks
    on one thread, reads on another and writes on a third.

    Args:
        config: The checked config of the store.
        registry: Plugins that it names.
        place: This rank.
        model: Whose KV it is.
        salt: Isolates all keys.
    """

    def __init__(self, config: Config, registry: Registry, place: Place, model: Model, salt: str | None = None) -> None:
        self._config = config
        self._registry = registry
        self._place = place
        self._model = model
        self._salt = salt
        self._lock = threading.Lock()
        self._pools: dict[str, PoolStore | None] = {}  # replaced, never changed; None: a pool without bytes
        self._host_pools: dict[str, Any] = {}
        self._block_tokens = 0
        self._told: set[str] = set()
        self._closed = False
        self.transfers = TransferLog()

    # -- pools

    def add_pool(self, name: str, pool: Any) -> None:
        """Open the store for a pool; the KV pool comes first, since its page is what a key stands for.

        Adding the same pool again does nothing; another pool of that name replaces it.

        Raises:
            ConfigError: The KV pool is not known yet, or the store was closed.
            NotSupportedError: The pool's pages cannot be stored.
            BackendError: A required tier cannot be opened.
        """
        with self._lock:
            if self._host_pools.get(name) is pool:
                return
            if self._closed:
                msg = f"host pool {name!r} was registered after close(); attach the storage backend again"
                raise ConfigError(msg)
            if name == KV:
                self._block_tokens = int(getattr(pool, "logical_page_size", None) or pool.page_size)
            elif not self._block_tokens:
                msg = f"host pool {name!r} was registered before the KV pool; expected register_mem_pool_host() first"
                raise ConfigError(msg)
            store = None if is_logical(pool) else self._open(name, pool)
            old = self._pools.get(name)
            self._pools = self._pools | {name: store}
            self._host_pools[name] = pool
        if old is not None:
            old.cache.close()

    def _open(self, name: str, pool: Any) -> PoolStore:
        spec = page_spec(pool, name, block_tokens=self._block_tokens)
        namespace = namespace_of(pool, name, spec, self._place, self._model)
        cache = KVCache.open(self._config, spec=spec, namespace=namespace, registry=self._registry)
        writes = self._place.writes(name)
        logger.info(
            "kvstore keeps pool %r of %s: %d bytes a page of %d tokens, namespace %s%s",
            *(name, namespace.model, spec.nbytes, spec.block_tokens, namespace.digest(spec).hex()),
            "" if writes else ", read only on this rank",
        )
        return PoolStore(name, cache, HostPages(pool, spec), salt=self._salt, writes=writes)

    def pool(self, name: str) -> PoolStore | None:
        """The store of a pool, None when it is not known or has no bytes."""
        return self._pools.get(name)

    def _is_logical(self, name: str) -> bool:
        return name in self._pools and self._pools[name] is None

    # -- presence

    def count(self, name: str, keys: PageKeys) -> int:
        """How many leading pages of a pool are stored."""
        if self._is_logical(name):
            return len(keys.hashes)  # no bytes, nothing that could be missing; the other pools decide
        store = self.pool(name)
        return 0 if store is None or not keys.hashes else store.count(keys)

    def each(self, name: str, keys: PageKeys) -> list[bool]:
        """Which pages of a pool are stored."""
        if self._is_logical(name):
            return [True] * len(keys.hashes)
        store = self.pool(name)
        return [False] * len(keys.hashes) if store is None or not keys.hashes else store.each(keys)

    def restorable(self, keys: PageKeys, queries: Sequence[PoolQuery]) -> Restorable:
        """How far all pools together can restore a prefix."""

        def keyed(hashes: Sequence[str]) -> PageKeys:
            # Only a run from the first page on has the pages before it that were given.
            contiguous = list(hashes) == list(keys.hashes[: len(hashes)])
            return PageKeys(hashes, keys.before if contiguous else None)

        return restorable(
            keys.hashes,
            queries,
            kv=KV,
            count=lambda name, hashes: self.count(name, keyed(hashes)),
            each=lambda name, hashes: self.each(name, keyed(hashes)),
        )

    # -- pages in a host pool

    def load(self, name: str, run: PageRun) -> list[bool]:
        """Bring pages into a pool: true for each one that is there now, from the first up to the first miss."""
        return self._move(name, run, PoolStore.load, self.transfers.note_load)

    def save(self, name: str, run: PageRun) -> list[bool]:
        """Store pages of a pool: true for each one that was accepted, which are the leading ones."""
        return self._move(name, run, PoolStore.save, self.transfers.note_save)

    def _move(
        self,
        name: str,
        run: PageRun,
        move: Callable[[PoolStore, PageKeys, torch.Tensor], int],
        note: Callable[[Transfer], None],
    ) -> list[bool]:
        n_pages = len(run.keys.hashes)
        if self._is_logical(name):
            return [True] * n_pages
        store, indices = self.pool(name), run.host_indices
        if store is None or not n_pages:
            return [False] * n_pages
        wanted = n_pages * store.pages.indices_per_page
        if indices is None or indices.numel() != wanted:
            self._tell_mismatch(name, indices, n_pages, wanted)
            return [False] * n_pages
        begin_s = time.perf_counter()
        done = move(store, run.keys, indices)
        note(Transfer(done, done * store.cache.spec.nbytes, time.perf_counter() - begin_s))
        return [True] * done + [False] * (n_pages - done)

    def _tell_mismatch(self, name: str, indices: torch.Tensor | None, n_pages: int, wanted: int) -> None:
        with self._lock:
            if name in self._told:
                return
            self._told.add(name)
        given = "no" if indices is None else str(indices.numel())
        text = "pool %r: %s host indices for %d pages, expected %d; such transfers move nothing (told once per pool)"
        logger.warning(text, name, given, n_pages, wanted)

    # -- pages as tensors

    def get(self, hashes: Sequence[str], targets: Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
        """Leading KV pages as flat tensors: those given, or new ones; None from the first miss on.

        Raises:
            ValueError: Another number of tensors than hashes, or one has another size than a page.
        """
        store = self.pool(KV)
        if store is None or not hashes:
            return [None] * len(hashes)
        spec = store.cache.spec
        if targets is None:
            targets = torch.empty(len(hashes), spec.nbytes // spec.itemsize, dtype=spec.torch_dtype()).unbind(0)
        _check_count(hashes, targets)
        blocks = [as_block(target, spec) for target in targets]
        n_pages = store.load_into(PageKeys(hashes), blocks)
        for target, block in zip(targets[:n_pages], blocks, strict=False):
            if block.data_ptr() != target.data_ptr():  # it had gaps
                target.copy_(block.reshape(-1).view(target.dtype).view(target.shape))
        return [*targets[:n_pages], *[None] * (len(hashes) - n_pages)]

    def set(self, hashes: Sequence[str], values: Sequence[torch.Tensor]) -> bool:
        """Store KV pages given as tensors; true when all were accepted.

        Raises:
            ValueError: As for :meth:`get`.
        """
        store = self.pool(KV)
        if store is None:
            return self._is_logical(KV)
        _check_count(hashes, values)
        spec = store.cache.spec
        return store.save_from(PageKeys(hashes), [as_block(v, spec) for v in values]) == len(hashes)

    # -- upkeep

    def clear(self) -> None:
        """Forget what the known pools have stored, on all hosts that share the tiers."""
        for store in self._stores():
            store.cache.clear()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted so far is stored, refused or dropped.

        Raises:
            DeadlineError: A tier did not get there in time.
        """
        for store in self._stores():
            store.cache.flush(timeout_s)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of each pool's cache, ready for JSON."""
        return {store.name: store.cache.stats().to_dict() for store in self._stores()}

    def close(self) -> None:
        """Write out what is queued and release everything; idempotent.  Later calls are misses."""
        with self._lock:
            self._closed = True
        for store in self._stores():
            store.cache.close()

    def _stores(self) -> list[PoolStore]:
        return [store for store in self._pools.values() if store is not None]


def _check_count(hashes: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    if len(hashes) != len(tensors):
        msg = f"{len(tensors)} tensors for {len(hashes)} keys; expected one per key"
        raise ValueError(msg)

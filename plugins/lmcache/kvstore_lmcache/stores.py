"""The stores of one connector: one open cache for each model and form of chunk."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.counting import Counting
from kvstore.engines.store_config import load_store_config
from kvstore.errors import KVStoreError
from kvstore.plugins import Registry
from kvstore_lmcache.identity import namespace_of
from kvstore_lmcache.layout import ChunkForm
from kvstore_lmcache.options import Options
from kvstore_lmcache.store import ChunkStore, StoreCounters

logger = logging.getLogger("kvstore.lmcache")

_RETRY_S: Final = 30.0  # an engine asks many times a second; a medium that is away comes back in minutes

# A record that needs no model: opening it proves that every tier can be opened.
_PROBE_SPEC: Final = BlockSpec.opaque(64, block_tokens=1, tag="lmcache probe")


class Stores:
    """Opens caches as they are needed and closes them together; thread-safe.

    All of them use the same tiers: the same database, files or bucket.

    Args:
        options: As the user wrote them.
        hashing: LMCache's algorithm of chunk hashes, if known: equal numbers of two algorithms mean nothing.
        version: LMCache's version, if known.
        registry: The plugins, if not those that are installed.

    Raises:
        ConfigError: The store's config is wrong.
        PluginError: A named plugin cannot be used.
    """

    def __init__(
        self,
        options: Options,
        *,
        hashing: str | None = None,
        version: str | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._options: Final = options
        self._hashing: Final = "" if hashing is None else f", hashes {hashing}"
        self._version: Final = version
        self._registry: Final = registry
        self._config: Final = load_store_config(options.config, registry, salt=options.salt)
        self._lock: Final = threading.Lock()
        self._stores: Final[dict[tuple[str, ChunkForm], ChunkStore]] = {}
        self._retry_at: Final[dict[tuple[str, ChunkForm], float]] = {}
        self._counters: Final = Counting(StoreCounters())
        self._closed = False

    def probe(self) -> None:
        """Open every tier once.

        Raises:
            BackendError: A required tier cannot be opened.
        """
        namespace = Namespace(model="lmcache-probe", revision="none")
        KVCache.open(self._config, spec=_PROBE_SPEC, namespace=namespace, registry=self._registry).close()

    def open(self, model: str, form: ChunkForm) -> ChunkStore:
        """The store of this model and form, opened now if it is not open.

        Raises:
            KVStoreError: It cannot be opened, or these stores are closed.
        """
        with self._lock:
            return self._stores.get((model, form)) or self._open(model, form)

    def find(self, model: str, form: ChunkForm) -> ChunkStore | None:
        """Like :meth:`open`, but None if that fails, and then for a while without trying again."""
        with self._lock:
            place = (model, form)
            store = self._stores.get(place)
            if store is not None or self._closed or time.monotonic() < self._retry_at.get(place, 0.0):
                return store
            try:
                return self._open(model, form)
            except KVStoreError as e:
                self._counters.add(failed=1)
                self._retry_at[place] = time.monotonic() + _RETRY_S
                logger.warning("no store for %s (next try in %gs): %s", model, _RETRY_S, e)
                return None

    def opened(self, model: str) -> list[ChunkStore]:
        """The stores of a model that are open, in the order of opening."""
        with self._lock:
            return [store for (name, _), store in self._stores.items() if name == model]

    @property
    def counters(self) -> StoreCounters:
        """What became of the chunks of all stores."""
        return self._counters.snapshot()

    def count(self, **amounts: int) -> None:
        """Add to the counters."""
        self._counters.add(**amounts)

    def healthy(self) -> bool:
        """Whether no store has lost all of its tiers."""
        with self._lock:
            return all(store.cache.health().state != "down" for store in self._stores.values())

    def close(self) -> None:
        """Write out what is queued, within seconds, and close everything; idempotent."""
        with self._lock:
            self._closed = True
            stores = list(self._stores.values())
        for store in stores:
            store.cache.close()

    def _open(self, model: str, form: ChunkForm) -> ChunkStore:
        namespace = namespace_of(model, self._options, form.tag + self._hashing, self._version)
        cache = KVCache.open(self._config, spec=form.spec, namespace=namespace, registry=self._registry)
        store = ChunkStore(
            cache, salt=self._options.salt, put_timeout_s=self._options.put_timeout, counters=self._counters
        )
        self._stores[model, form] = store
        return store

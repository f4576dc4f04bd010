"""The remote connector of LMCache's in-process engine, and the adapter that LMCache finds it by."""

from __future__ import annotations

import asyncio
import builtins
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import lmcache
import torch
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.errors import ConfigError
from kvstore_lmcache.layout import ChunkLayout
from kvstore_lmcache.memory import bytes_of, layout_of, name_of_key
from kvstore_lmcache.options import Options, plugin_name_of, plugin_options
from kvstore_lmcache.shelf import ChunkShelf
from kvstore_lmcache.store import StoreCounters
from kvstore_lmcache.stores import Stores
from kvstore_lmcache.threads import Threads
from kvstore_lmcache.whole import WholeChunk

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.connector import ConnectorContext

logger = logging.getLogger("kvstore.lmcache")

Loaded: TypeAlias = "list[MemoryObj | None]"

PLUGIN_TYPE: Final = "kvstore"

# How long a load waits for room in LMCache's memory; stores under way give some back in less.
_MEMORY_WAIT_S: Final = 0.5

# A batch is loaded in as many threads as have this much to do: copying and checksums of one are bound by a core.
_PART_BYTES: Final = 16 << 20


class KVStoreConnectorAdapter(ConnectorAdapter):
    """Makes the connector for plugins named ``kvstore`` or ``kvstore.<anything>``."""

    def __init__(self) -> None:
        super().__init__(f"{PLUGIN_TYPE}://")

    def can_parse(self, url: str) -> bool:
        """Whether ``url`` is ours."""
        if url.startswith("plugin://"):
            return bool(extract_plugin_type(url.removeprefix("plugin://")) == PLUGIN_TYPE)
        return url.startswith(self.schema)

    def create_connector(self, context: ConnectorContext) -> KVStoreConnector:
        """Open the store.

        Raises:
            IrrecoverableException: The configuration is wrong or the store cannot be opened; anything
                else would be tried again for ever, with every lookup a miss.
        """
        if context.plugin_name is None:
            raise IrrecoverableException(
                f"remote_url = {context.url!r}: kvstore is a remote storage plugin; say remote_storage_plugins: "
                "['kvstore'] with extra_config 'remote_storage_plugin.kvstore.config', and leave remote_url out"
            )
        return KVStoreConnector(
            context.loop, context.local_cpu_backend, context.config, context.plugin_name, context.metadata
        )


class KVStoreConnector(RemoteConnector):
    """Chunks of one worker in a kvstore config.

    Thread-safe.  No coroutine blocks the event loop: the store is asked in threads.  A medium that
    fails is a miss, or a chunk that is not stored.

    Args:
        loop: LMCache's event loop; not used, every coroutine runs where it is awaited.
        local_cpu_backend: Where memory for loaded chunks comes from.
        config: LMCache's configuration.
        plugin_name: Name in ``remote_storage_plugins``; looked up by the class name if None.
        metadata: LMCache's description of the engine; the one of ``local_cpu_backend`` if None.

    Raises:
        IrrecoverableException: The configuration is wrong or the store cannot be opened.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,  # noqa: ARG002 - LMCache passes it by name
        local_cpu_backend: Any,
        config: Any,
        plugin_name: str | None = None,
        metadata: Any = None,
    ) -> None:
        metadata = metadata or local_cpu_backend.metadata
        super().__init__(config, metadata)
        self._memory: Final = local_cpu_backend
        self._whole: Final = WholeChunk(self, config, metadata)
        try:
            name = plugin_name or plugin_name_of(config.extra_config, type(self).__name__)
            options = plugin_options(config.extra_config, name)
            stores, shelf = _open(options, config, metadata, self._whole.layout)
        except Exception as e:  # noqa: BLE001 - the border to LMCache, which would retry anything else for ever
            _fail(plugin_name, e)
        self._stores: Final = stores
        self._shelf: Final = shelf
        self._workers: Final = options.workers
        self._threads: Final = Threads(options.workers)
        _warn_of_unstable_hashes(config.pre_caching_hash_algorithm)

    @property
    def counters(self) -> StoreCounters:
        """What became of this worker's chunks."""
        return self._stores.counters

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is there."""
        return await self._threads.read(lambda: self._leading([key])) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is there; asks in the calling thread."""
        return self._leading([key]) == 1

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk in memory of LMCache's, which the caller gives back; None for a miss."""
        return (await self.batched_get([key]))[0]

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Store a chunk; done when it can be found, or was refused and counted."""
        await self.batched_put([key], [memory_obj])

    async def list(self) -> builtins.list[str]:
        """Not offered: stored names are digests, from which no key can be made.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("kvstore names chunks by digests; `kvstore stat` shows what is stored")

    async def close(self) -> None:
        """Store what is waiting, within seconds, and close the store."""
        await asyncio.to_thread(self._close)

    def support_ping(self) -> bool:
        """Yes."""
        return True

    async def ping(self) -> int:
        """0 while at least one tier answers."""
        return 0 if self._stores.healthy() else 1

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> Loaded:
        """Each chunk in memory of LMCache's, or None for a miss."""
        n_parts = max(1, min(self._workers, len(keys), len(keys) * self._whole.layout.nbytes // _PART_BYTES))
        parts = [keys[len(keys) * i // n_parts : len(keys) * (i + 1) // n_parts] for i in range(n_parts)]
        loaded = await self._threads.read_all([partial(self._load, part) for part in parts], discard=_give_back)
        return [memory for part in loaded for memory in part]

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Store chunks; done when they can be found, or were refused and counted."""
        for memory in memory_objs:
            memory.ref_count_up()  # the thread may still read when LMCache has given up waiting
        await self._threads.write(lambda: self._store(keys, memory_objs), lambda: _give_back(memory_objs))

    async def batched_async_contains(
        self,
        lookup_id: str,  # noqa: ARG002 - LMCache's signature
        keys: Sequence[CacheEngineKey],
        pin: bool = False,  # noqa: ARG002 - a chunk that is evicted before it is read is a miss
    ) -> int:
        """How many chunks are there before the first that is not."""
        return await self._threads.read(lambda: self._leading(keys))

    async def batched_get_non_blocking(
        self,
        lookup_id: str,  # noqa: ARG002 - LMCache's signature
        keys: Sequence[CacheEngineKey],
    ) -> builtins.list[MemoryObj]:
        """The chunks before the first that is missing."""
        loaded = await self.batched_get(keys)
        n = next((i for i, memory in enumerate(loaded) if memory is None), len(loaded))
        _give_back(loaded[n:])
        return [memory for memory in loaded[:n] if memory is not None]

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a chunk; whether it was there."""
        return self._shelf.delete(name_of_key(key))

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are there before the first that is not; asks in the calling thread."""
        return self._leading(keys)

    def _leading(self, keys: Sequence[CacheEngineKey]) -> int:
        return self._shelf.leading([name_of_key(key) for key in keys])

    def _store(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        chunks = [(layout_of(memory), bytes_of(memory)) for memory in memory_objs]
        self._shelf.put([name_of_key(key) for key in keys], chunks)

    def _load(self, keys: Sequence[CacheEngineKey]) -> Loaded:
        held: dict[int, MemoryObj] = {}
        until = time.monotonic() + _MEMORY_WAIT_S

        def allocate(i: int, layout: ChunkLayout) -> torch.Tensor | None:
            _give_back([held.pop(i, None)])
            memory = self._whole.allocate(self._memory, layout, until)
            if memory is None:
                return None
            held[i] = memory
            return bytes_of(memory)

        try:
            got = self._shelf.get([name_of_key(key) for key in keys], allocate)
            return [None if layout is None else held.pop(i) for i, layout in enumerate(got)]
        finally:
            _give_back([*held.values()])

    def _close(self) -> None:
        self._threads.close()
        self._stores.close()


def _open(options: Options, config: Any, metadata: Any, layout: ChunkLayout) -> tuple[Stores, ChunkShelf]:
    if config.remote_serde != "naive":
        raise ConfigError(
            f"remote_serde = {config.remote_serde!r}: expected 'naive'; kvstore compresses by itself, without "
            "loss (the tier's 'codec')"
        )
    stores = Stores(options, hashing=config.pre_caching_hash_algorithm, version=lmcache.__version__)
    try:
        shelf = ChunkShelf(
            stores,
            metadata.model_name,
            layout,
            chunk_tokens=metadata.chunk_size,
            partial=config.save_unfull_chunk,
        )
    except BaseException:
        stores.close()
        raise
    return stores, shelf


def _fail(plugin_name: str | None, error: Exception) -> NoReturn:
    # LMCache logs this class and goes on without the plugin; anything else it would keep as a backend
    # without a connection, where every lookup is a miss.
    raise IrrecoverableException(f"remote storage plugin {plugin_name or 'of KVStoreConnector'}: {error}") from error


def _warn_of_unstable_hashes(algorithm: str) -> None:
    if algorithm == "builtin":
        logger.warning(
            "LMCache names chunks by Python's hash() (pre_caching_hash_algorithm = 'builtin'), for which a prompt "
            "with another one's names can be made up; set it to 'sha256_cbor' where prompts are not trusted"
        )
    if "vllm" in sys.modules and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        logger.warning(
            "PYTHONHASHSEED is not set: with vLLM, LMCache's chunk hashes then differ in every process, and "
            "nothing stored is found by another one; set it to the same number everywhere"
        )


def _give_back(memory_objs: Sequence[MemoryObj | None]) -> None:
    for memory in memory_objs:
        if memory is not None:
            memory.ref_count_down()

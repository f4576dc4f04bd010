"""LMCache's in-process engine without a serving engine: its storage manager, memory pool and event loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.storage_manager import StorageManager

LAYERS, HEADS, HEAD_DIM, CHUNK_TOKENS = 4, 2, 16, 32
MODEL = "tiny"
PLUGIN = "remote_storage_plugin.kvstore"
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Given:
    """What a test says about an engine; the rest is tiny.

    Attributes:
        config: The kvstore config.
        options: More options of the plugin.
        lmcache: More settings of LMCache.
        metadata: More fields of LMCache's metadata.
        plugin: Name of the plugin.
        class_name: Class that LMCache loads.
    """

    config: Any = None
    options: tuple[tuple[str, Any], ...] = (("revision", "r"),)
    lmcache: tuple[tuple[str, Any], ...] = ()
    metadata: tuple[tuple[str, Any], ...] = ()
    plugin: str = "kvstore"
    class_name: str = "KVStoreConnectorAdapter"


class Engine:
    """A storage manager with one remote backend, ours; settings are those of :class:`Given`."""

    def __init__(self, **settings: Any) -> None:
        given = Given(**settings)
        self.plugin = given.plugin
        extra = {f"remote_storage_plugin.{given.plugin}.{name}": value for name, value in given.options}
        extra[f"remote_storage_plugin.{given.plugin}.module_path"] = "kvstore_lmcache.connector"
        extra[f"remote_storage_plugin.{given.plugin}.class_name"] = given.class_name
        extra[f"remote_storage_plugin.{given.plugin}.config"] = given.config
        values = {"chunk_size": CHUNK_TOKENS, "local_cpu": False, "max_local_cpu_size": 0.02, "extra_config": extra}
        values |= {"remote_storage_plugins": [given.plugin], "pre_caching_hash_algorithm": "sha256_cbor"}
        self.config = LMCacheEngineConfig.from_defaults(**(values | dict(given.lmcache)))
        fields: dict[str, Any] = {"world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0}
        fields |= {"kv_dtype": torch.bfloat16, "kv_shape": (LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_DIM)}
        fields |= {"model_name": MODEL, "chunk_size": CHUNK_TOKENS, "role": "worker"}
        self.metadata = LMCacheMetadata(**(fields | dict(given.metadata)))
        PinMonitor.GetOrCreate(self.config)
        self.manager = StorageManager(self.config, self.metadata, EventManager())
        self.pool = self.manager.allocator_backend.get_memory_allocator()
        self._stopped = False

    @property
    def backend(self) -> Any:
        """LMCache's remote backend."""
        return self.manager.storage_backends[f"RemoteBackend-{self.plugin}"]

    @property
    def connector(self) -> Any:
        """Our connector, without LMCache's wrapper."""
        return self.backend.connection.getWrappedConnector()

    def keys(self, *hashes: int, **fields: Any) -> list[CacheEngineKey]:
        """Keys of chunks."""
        known: dict[str, Any] = {"model_name": MODEL, "world_size": 1, "worker_id": 0, "dtype": torch.bfloat16}
        return [CacheEngineKey(chunk_hash=value, **(known | fields)) for value in hashes]

    def chunk(self, seed: int, tokens: int = CHUNK_TOKENS) -> Any:
        """A memory object with random content, as LMCache fills it before it stores."""
        shapes, dtypes = self.metadata.get_shapes(tokens), self.metadata.get_dtypes()
        memory = self.manager.allocate(shapes, dtypes, busy_loop=False)
        memory.raw_tensor[: memory.get_size()].copy_(content(memory.get_size(), seed))
        return memory

    def put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[Any]) -> None:
        """Store, wait until LMCache has given back what it held, and give back what we hold."""
        self.backend.batched_submit_put_task(list(keys), list(memory_objs))
        until(lambda: all(memory.get_ref_count() == 1 for memory in memory_objs))
        for memory in memory_objs:
            memory.ref_count_down()

    def get(self, keys: Sequence[CacheEngineKey]) -> list[bytes | None]:
        """Load, copy the bytes out, and give the memory back."""
        found = []
        for memory in self.backend.batched_get_blocking(list(keys)):
            found.append(None if memory is None else bytes(memory.byte_array))
            if memory is not None:
                assert memory.get_ref_count() == 1
                memory.ref_count_down()
        return found

    def free_bytes(self) -> int:
        """Unused bytes of LMCache's memory pool."""
        return int(self.pool.pin_allocator.address_manager.get_free_size())

    def stop(self) -> None:
        """Stop the engine; its memory pool must be sound."""
        if not self._stopped:
            self._stopped = True
            assert self.manager.memcheck()
            self.manager.close()
            self.manager.thread.join()
            self.manager.loop.close()  # LMCache leaves it open


def content(nbytes: int, seed: int) -> torch.Tensor:
    """Random bytes that the seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def until(condition: Any) -> None:
    """Poll until ``condition()`` holds."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def lmdb(path: Any, **options: Any) -> dict[str, Any]:
    """A config with one LMDB tier."""
    return {"l2": [{"backend": "lmdb", "path": str(path), "capacity": "256MiB"} | options]}

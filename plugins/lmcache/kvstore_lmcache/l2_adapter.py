"""The L2 adapter of LMCache's server (multiprocess mode)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvstore.errors import KVStoreError
from kvstore_lmcache.layout import ChunkLayout
from kvstore_lmcache.memory import bytes_of, layout_of, name_of_object
from kvstore_lmcache.options import Options, read_options
from kvstore_lmcache.store import ChunkStore
from kvstore_lmcache.stores import Stores
from kvstore_lmcache.tasks import TaskBoard

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger("kvstore.lmcache")

# For objects whose shape does not tell their tokens: counts of tokens are counts of objects then.
_CHUNK_TOKENS: Final = 1

K = TypeVar("K")


class KVStoreL2AdapterConfig(L2AdapterConfigBase):
    """``adapter_params`` of ``{"type": "plugin", "module_path": "kvstore_lmcache.l2_adapter", ...}``.

    Args:
        options: As read.
    """

    def __init__(self, options: Options) -> None:
        self.options: Final = options

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> KVStoreL2AdapterConfig:
        """Read the options.

        Raises:
            ValueError: A key is unknown or a value is wrong.
        """
        try:
            return cls(read_options(d, "adapter_params"))
        except KVStoreError as e:
            raise ValueError(str(e)) from e

    @classmethod
    def help(cls) -> str:
        """The options, for LMCache's command line."""
        return (
            "kvstore L2 adapter, adapter_params:\n"
            "- config (str or object): kvstore config: path of a TOML file, or an inline object of the same form "
            "(default: the file named by KVSTORE_CONFIG)\n"
            "- revision, text_config, kv_scales, salt (str): identity of the model's KV\n"
            "- workers (int): threads that read, and as many that write (default 4)\n"
            "- put_timeout (str): longest time that one store task takes (default '30s')"
        )


class KVStoreL2Adapter(L2AdapterInterface):
    """Objects of LMCache's server in a kvstore config.

    Thread-safe.  Tasks run in threads and are answered by LMCache's event notifiers; a medium that
    fails is a miss or a store that did not succeed.  Objects are not locked against the store's own
    eviction: one that is evicted between lookup and load is a miss.

    Args:
        config: What :class:`KVStoreL2AdapterConfig` read.
        l1_memory_desc: LMCache's memory; not used, buffers come with each task.

    Raises:
        KVStoreError: The store's config is wrong, or a required tier cannot be opened.
    """

    def __init__(self, config: KVStoreL2AdapterConfig, l1_memory_desc: object = None) -> None:  # noqa: ARG002
        super().__init__()  # no capacity: the tiers keep theirs and evict by themselves
        self._stores: Final = Stores(config.options, version=lmcache.__version__)
        self._stores.probe()
        self._store_fd: Final = create_event_notifier()
        self._lookup_fd: Final = create_event_notifier()
        self._load_fd: Final = create_event_notifier()
        ids, workers = itertools.count(), config.options.workers
        self._storing: Final = TaskBoard[L2StoreResult](ids, workers, self._store_fd.notify, "kvstore-l2-store")
        self._looking: Final = TaskBoard[Bitmap](ids, workers, self._lookup_fd.notify, "kvstore-l2-lookup")
        self._loading: Final = TaskBoard[Bitmap](ids, workers, self._load_fd.notify, "kvstore-l2-load")
        self._closed = False

    def get_store_event_fd(self) -> int:
        """Signaled when a store task ends."""
        return int(self._store_fd.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signaled when a lookup task ends."""
        return int(self._lookup_fd.fileno())

    def get_load_event_fd(self) -> int:
        """Signaled when a load task ends."""
        return int(self._load_fd.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store objects; those that are there already are skipped."""
        return self._storing.submit(
            lambda: self._store(keys, objects), L2StoreResult(success=False, bytes_transferred=0)
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Success and bytes written of each store task that ended since the last call."""
        return self._storing.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look objects up.  Their layouts are part of their names, so ``group_layout_descs`` is needed."""
        return self._looking.submit(lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which objects were there, once; None while the task runs."""
        return self._looking.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing to do: nothing is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load objects into the caller's memory."""
        return self._loading.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which objects were delivered, verified, once; None while the task runs."""
        return self._loading.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, whatever their layouts, as far as this process knows them."""
        for key in keys:
            name = name_of_object(key)
            sizes = [store.chunk_bytes for store in self._stores.opened(key.model_name) if store.delete([name])]
            if sizes:
                self._notify_keys_deleted([key], sizes[:1])

    def close(self) -> None:
        """Let running tasks end, store what is waiting and close the store; idempotent."""
        if self._closed:
            return
        self._closed = True
        for board in (self._looking, self._loading, self._storing):
            board.close()
        self._stores.close()
        for fd in (self._store_fd, self._lookup_fd, self._load_fd):
            fd.close()

    def report_status(self) -> dict[str, Any]:
        """Health and counters."""
        return {
            "is_healthy": not self._closed and self._stores.healthy(),
            "type": type(self).__name__,
            **asdict(self._stores.counters),
        }

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        names = [name_of_object(key) for key in keys]
        fresh: list[int] = []
        ok = True
        for store, indices in self._by_store(keys, lambda i: _plain(objects[i])):
            if store is None:
                ok = False
                continue
            there = store.contains([names[i] for i in indices])
            new = [i for i, found in zip(indices, there, strict=True) if not found]
            stored = store.put([names[i] for i in new], [bytes_of(objects[i]) for i in new])
            fresh += [i for i, done in zip(new, stored, strict=True) if done]
            ok = ok and all(stored)
        sizes = [int(objects[i].get_size()) for i in fresh]
        if fresh:
            self._notify_keys_stored([keys[i] for i in fresh], sizes)
        return L2StoreResult(ok, sum(sizes))

    def _look_up(self, keys: Sequence[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        names = [name_of_object(key) for key in keys]
        found = Bitmap(len(keys))
        for store, indices in self._by_store(keys, lambda i: _described(layouts.get(keys[i].object_group_id))):
            # Without a description, what this process has stored or loaded tells the layouts.
            stores = self._stores.opened(keys[indices[0]].model_name) if store is None else [store]
            for one in stores:
                there = one.contains([names[i] for i in indices])
                found.batched_set([i for i, yes in zip(indices, there, strict=True) if yes])
        return found

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        names = [name_of_object(key) for key in keys]
        loaded = Bitmap(len(keys))
        for store, indices in self._by_store(keys, lambda i: _plain(objects[i])):
            if store is not None:
                got = store.get([names[i] for i in indices], [bytes_of(objects[i]) for i in indices])
                loaded.batched_set([i for i, yes in zip(indices, got, strict=True) if yes])
        self._stores.count(loaded=loaded.popcount(), missed=len(keys) - loaded.popcount())
        if loaded.popcount():
            self._notify_keys_accessed(loaded.gather(keys))
        return loaded

    def _by_store(
        self, keys: Sequence[ObjectKey], layout: Callable[[int], ChunkLayout | None]
    ) -> list[tuple[ChunkStore | None, list[int]]]:
        places: dict[tuple[str, ChunkLayout | None], list[int]] = {}
        for i, key in enumerate(keys):
            places.setdefault((key.model_name, layout(i)), []).append(i)
        return [(self._open(model, chunk), indices) for (model, chunk), indices in places.items()]

    def _open(self, model: str, layout: ChunkLayout | None) -> ChunkStore | None:
        if layout is None:
            return None
        return self._stores.find(model, layout.form(_CHUNK_TOKENS))


def _plain(memory: MemoryObj) -> ChunkLayout:
    # LMCache's lookups know shapes and dtypes; the format is the same for all of a server's objects.
    return replace(layout_of(memory), fmt="")


def _described(desc: MemoryLayoutDesc | None) -> ChunkLayout | None:
    if desc is None or not desc.shapes:
        return None
    return ChunkLayout.of(desc.shapes, desc.dtypes)

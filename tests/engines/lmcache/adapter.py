"""LMCache's server side without a server: an L2 adapter made by its factory, driven through its event notifiers."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from tests.engines.lmcache.engine import content

SHAPE = torch.Size([2, 4, 32, 32])
LAYOUTS = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}
NBYTES = SHAPE.numel() * 2
_PATIENCE_S = 20.0


class Server:
    """An adapter and what LMCache's controllers do with it."""

    def __init__(self, **params: Any) -> None:
        spec = {"type": "plugin", "module_path": "kvstore_lmcache.l2_adapter", "class_name": "KVStoreL2Adapter"}
        config = get_l2_adapter_config_class("plugin").from_dict(spec | {"adapter_params": {"revision": "r"} | params})
        self.adapter: Any = create_l2_adapter_from_registry(config)
        self.adapter.set_backend_identity("plugin")

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Any:
        """Store, and wait for the result."""
        adapter = self.adapter
        task = adapter.submit_store_task(list(keys), list(objects))
        results: dict[int, Any] = {}

        def ended() -> bool:
            results.update(adapter.pop_completed_store_tasks())
            return task in results

        wait(adapter.get_store_event_fd(), ended)
        return results[task]

    def look_up(self, keys: Sequence[ObjectKey], layouts: dict[int, Any] | None = None) -> list[int]:
        """Indices of the keys that are there."""
        adapter = self.adapter
        task = adapter.submit_lookup_and_lock_task(list(keys), LAYOUTS if layouts is None else layouts)
        found = answer(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
        adapter.submit_unlock(list(keys))
        assert len(found) == len(keys)
        return list(found.get_indices_list())

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[int]:
        """Indices of the objects that were delivered."""
        adapter = self.adapter
        task = adapter.submit_load_task(list(keys), list(objects))
        loaded = answer(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        assert len(loaded) == len(keys)
        return list(loaded.get_indices_list())


def wait(fd: int, ended: Callable[[], bool]) -> None:
    """Wait for an event notifier until ``ended()`` holds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not ended():
        assert poll.poll(_PATIENCE_S * 1000), "no event"
        consume_fd(fd)


def answer(fd: int, query: Callable[[], Any]) -> Any:
    """Wait for an event notifier until the query has an answer."""
    found: list[Any] = []

    def ended() -> bool:
        result = query()
        if result is not None:
            found.append(result)
        return bool(found)

    wait(fd, ended)
    assert query() is None  # an answer is given once
    return found[0]


def keys(*hashes: int, **fields: Any) -> list[ObjectKey]:
    """Keys of objects."""
    known: dict[str, Any] = {"model_name": "tiny", "kv_rank": 0x01000100}
    return [ObjectKey(chunk_hash=value.to_bytes(32, "big"), **(known | fields)) for value in hashes]


def memory(seed: int | None = None, shape: torch.Size = SHAPE, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A memory object with random content, or with zeros."""
    nbytes = shape.numel() * dtype.itemsize
    raw = torch.zeros(nbytes, dtype=torch.uint8) if seed is None else content(nbytes, seed)
    meta = MemoryObjMetadata(shape, dtype, 0, nbytes, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype])
    return TensorMemoryObj(raw, meta, None)

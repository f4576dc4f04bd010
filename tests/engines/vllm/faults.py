"""A tier whose store misbehaves at random; loaded into vLLM by ``module_path``."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstore_vllm.tier import KVStoreTier

from kvstore.backend import Backend, Capability, PutItem, Receive
from kvstore.errors import BackendError, BackendUnavailableError
from kvstore.memory_backend import MemoryBackend, MemoryOptions
from kvstore.plugins import Registry
from kvstore.testing.doubles import ReadWrappingBackend
from kvstore.testing.registering import register_backend
from kvstore.types import Call, Presence, PutStatus, ReadStatus

T = TypeVar("T")

_SHARE: Final = 0.05  # of operations for every kind of fault


class MoodyBackend(ReadWrappingBackend):
    """Raises, lies, tears, loses and dawdles, each with a fixed probability per operation."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        # Dawdling takes place in the tier's threads, as on a medium behind a network.
        self.capabilities &= ~Capability.CALLER_READS  # type: ignore[misc]  # as in its parent
        self._dice = random.Random(20260101)
        self._lock = threading.Lock()

    def _hits(self) -> bool:
        with self._lock:
            return self._dice.random() < _SHARE

    def around(self, operation: str, work: Callable[[], T]) -> T:
        if operation not in {"get_many", "put_many", "exists_many", "delete_many"}:
            return work()
        if self._hits():
            msg = "the medium is in a bad mood"
            raise BackendUnavailableError(msg)
        if self._hits():
            msg = "a driver's error of no particular kind"
            raise BackendError(msg)
        if self._hits():
            time.sleep(0.5)  # past the tier's deadline of 200 ms
        return work()

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        def maybe_torn(i: int, view: memoryview) -> None:
            data = bytearray(view)
            if self._hits():
                data[len(data) // 2] ^= 0x40
            elif self._hits():
                del data[len(data) // 3 :]
            receive(i, memoryview(data))

        if self._hits():
            return [ReadStatus.ABSENT] * len(names)
        return super().get_many(names, maybe_torn, call)

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        if self._hits():
            return [PutStatus.FULL] * len(items)
        if self._hits():
            return [PutStatus.STORED] * len(items)  # and nothing is
        return super().put_many(items, call)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        if self._hits():
            return [Presence.PRESENT] * len(names)
        return super().exists_many(names, call)


class MoodyTier(KVStoreTier):
    """The tier with such a backend among its plugins, under the name ``moody``."""

    @classmethod
    def plugin_registry(cls) -> Registry:
        registry, _ = register_backend(lambda: MoodyBackend(MemoryBackend()), name="moody", options=MemoryOptions)
        return registry

"""A backend in process memory: the smallest complete example, and a fast tier for tests."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.backend import Backend, BackendContext, Capability, PutItem, Receive, RecordInfo, Usage
from kvstore.errors import ClosedError
from kvstore.types import Call, Presence, PutStatus, ReadStatus

_CHECKSUM_AT = slice(184, 192)  # header checksum of a record, see the record format


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The memory backend has no options of its own."""


class MemoryBackend(Backend):
    """Keeps records in a dict and evicts the least recently written or touched ones.

    Thread-safe.  Nothing survives :meth:`close`.
    """

    capabilities: ClassVar[Capability] = Capability.CALLER_READS | Capability.SCAN | Capability.EVICTS

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._epochs: dict[bytes, bytes] = {}
        self._payload_bytes = 0
        self._evicted = 0
        self._context: BackendContext | None = None

    def open(self, context: BackendContext) -> None:
        """Start empty."""
        self._context = context

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._context = None
            self._records.clear()
            self._payload_bytes = 0

    def _opened(self) -> BackendContext:
        if self._context is None:
            msg = "the memory backend is closed; open it before use"
            raise ClosedError(msg)
        return self._context

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Hand out the stored bytes in the order of the names."""
        self._opened()
        statuses: list[ReadStatus] = []
        for i, name in enumerate(names):
            if call.stop():
                statuses.append(ReadStatus.SKIPPED if call.cancelled else ReadStatus.TIMEOUT)
                continue
            with self._lock:
                found = self._records.get(name)
            if found is None:
                statuses.append(ReadStatus.ABSENT)
                if call.leading_only:
                    break
                continue
            receive(i, memoryview(found[0]))
            statuses.append(ReadStatus.OK)
        return statuses + [ReadStatus.SKIPPED] * (len(names) - len(statuses))

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Copy each record; the last item of a call is the most valuable one."""
        return [PutStatus.TIMEOUT if call.stop() else self._put(item) for item in items]

    def _put(self, item: PutItem) -> PutStatus:
        context = self._opened()
        if context.read_only:
            return PutStatus.READ_ONLY
        capacity = context.capacity_bytes
        if capacity is not None and item.nbytes > capacity:
            return PutStatus.TOO_LARGE
        evicted: list[bytes] = []
        with self._lock:
            known = self._records.pop(item.name, None)
            if known is not None:
                self._records[item.name] = (known[0], time.time())
                return PutStatus.EXISTS
            data = b"".join(item.buffers)
            while capacity is not None and self._payload_bytes + len(data) > capacity:
                victim, (old, _) = self._records.popitem(last=False)
                self._payload_bytes -= len(old)
                evicted.append(victim)
            self._records[item.name] = (data, time.time())
            self._payload_bytes += len(data)
            self._evicted += len(evicted)
        if evicted:
            context.removed(evicted)
        return PutStatus.STORED

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Look names up in the dict."""
        del call
        self._opened()
        with self._lock:
            return [Presence.PRESENT if name in self._records else Presence.ABSENT for name in names]

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Drop records."""
        del call
        self._opened()
        with self._lock:
            return sum(self._remove(name) for name in names)

    def _remove(self, name: bytes) -> int:
        found = self._records.pop(name, None)
        if found is None:
            return 0
        self._payload_bytes -= len(found[0])
        return 1

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Drop the record unless it was repaired meanwhile."""
        self._opened()
        with self._lock:
            found = self._records.get(name)
            if found is None:
                return
            data = found[0]
            if len(data) < _CHECKSUM_AT.stop or int.from_bytes(data[_CHECKSUM_AT], "little") == header_checksum:
                self._remove(name)

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Keep epochs beside the records."""
        self._opened()
        with self._lock:
            if bump or namespace not in self._epochs:
                self._epochs[namespace] = os.urandom(8)
            return self._epochs[namespace]

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Move records to the recent end, the last name being the most valuable."""
        with self._lock:
            for name in names:
                if name in self._records:
                    self._records.move_to_end(name)

    def drop(self, name_prefix: bytes) -> None:
        """Remove an old epoch at once."""
        with self._lock:
            for name in [n for n in self._records if n.startswith(name_prefix)]:
                self._remove(name)

    def namespaces(self) -> list[bytes]:
        """Its own only: nobody else can see these records."""
        context = self._opened()
        return [context.namespace_json.encode()] if context.namespace else []

    def scan(self) -> Iterator[RecordInfo]:
        """List what is stored at the time of the call."""
        self._opened()
        with self._lock:
            listed = [RecordInfo(name, 0, len(data), last_use=at) for name, (data, at) in self._records.items()]
        return iter(listed)

    def usage(self) -> Usage:
        """Exact at the time of the call."""
        context = self._opened()
        with self._lock:
            return Usage(
                records=len(self._records),
                payload_bytes=self._payload_bytes,
                file_bytes=0,
                capacity_bytes=context.capacity_bytes or 0,
                evicted=self._evicted,
            )

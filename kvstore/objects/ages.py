"""How old objects count: what this process knows of their uses and their kinship."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import BackendError
from kvstore.objects.naming import key_of
from kvstore.objects.remembered import StoredObject

if TYPE_CHECKING:
    from kvstore.objects.store import ObjectStore

_WAITING: Final = 4096  # uses that wait at most; older ones are forgotten, which is allowed
_KNOWN: Final = 8192  # objects whose newest use and decided age are kept in memory, about 300 bytes each

_STEP_S: Final = 1e-3
"""How much older than the block before it a block counts, so that of one sequence the tail is evicted first."""

_SPREAD_S: Final = 60.0
"""How much older than now a new object may count: a sequence that goes on after long is a new use."""

_TICK_S: Final = 1e-6  # keeps the uses of one call in their order; a float of seconds resolves 0.2 µs

_SETTLED_S: Final = 5.0  # a write under load may take so long, and clocks of machines differ

_STEP: Final = 64  # objects refreshed by one call, so that refreshing never is the main traffic


class Ages:
    """What counts as the age of an object: uses and kinship that the medium may not know of.

    Used objects are made young again, once for many uses and only when they are old enough.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[StoredObject, float]] = {}  # key to a use that the medium is to be told
        self._used: OrderedDict[str, float] = OrderedDict()  # key to the newest use
        self._born: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key to the decided age, when decided

    def used(self, names: Iterable[bytes]) -> None:
        """Note uses, the most valuable name last; names whose object is not known are passed over."""
        settings = self._store.settings
        if self._store.context.read_only or not (settings.evicts or settings.refresh_after_s is not None):
            return
        now = time.time()
        with self._lock:
            for name in names:
                there = self._store.remembered.where(name)
                if there is not None:
                    now += _TICK_S
                    self._note(key_of(there.end), there, now)
            _trim(self._used, _KNOWN)
            while len(self._waiting) > _WAITING:
                del self._waiting[next(iter(self._waiting))]

    def _note(self, key: str, there: StoredObject, now: float) -> None:
        self._used.pop(key, None)  # to the recent end
        self._used[key] = now
        after = self._store.settings.refresh_after_s
        if after is not None and not (there.modified and now - there.modified < after):
            self._waiting.pop(key, None)
            self._waiting[key] = (there, now)

    def born(self, end: bytes, parent: bytes, blocks: int) -> None:
        """Decide what age a new object counts from: before the one it follows, though written after it."""
        now = time.time()
        with self._lock:
            before = self._born.get(key_of(parent), (0.0, 0.0))[0] if parent else now
            if not before:
                known = self._store.remembered.where(parent)
                before = known.modified if known is not None and known.modified else now
            key = key_of(end)
            self._born.pop(key, None)
            at = min(now, max(now - _SPREAD_S, before - blocks * _STEP_S)) if parent else now
            self._born[key] = (at, now)
            _trim(self._born, _KNOWN)

    def born_at(self, key: str) -> float:
        """Unix time that was decided; now when that is forgotten."""
        known = self._born.get(key)
        return time.time() if known is None else known[0]

    def age_of(self, key: str, modified: float) -> float:
        """Unix time that an object counts from, given what the medium says."""
        known = self._born.get(key)
        if known is not None and modified < known[1] + _SETTLED_S:  # as we wrote it, not refreshed since
            modified = known[0]
        return max(modified, self._used.get(key, 0.0))

    def flush(self) -> None:
        """Refresh some of the used objects."""
        with self._lock:
            keys = list(self._waiting)[:_STEP]
            todo = [(key, *self._waiting[key]) for key in keys]
        if todo:
            self._store.fanout.each(self._refresh, todo)
            with self._lock:
                for key, _, at in todo:
                    if self._waiting.get(key, (None, at))[1] == at:
                        self._waiting.pop(key, None)

    def _refresh(self, used: tuple[str, StoredObject, float]) -> None:
        key, there, _ = used
        call = self._store.call()
        try:
            if not there.modified:
                info = self._store.medium.head(key, call)
                if info is None:
                    self._store.lost(there.end)
                    return
                there.modified = info.modified
            if self._store.stale(there.modified):
                self._store.medium.refresh(key, call)
                there.modified = time.time()
        except BackendError:
            return  # a use is lost, which is allowed


def _trim(known: OrderedDict[str, Any], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)

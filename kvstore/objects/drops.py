"""Name prefixes whose records are to go: remembered on the medium, reclaimed bit by bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.objects.medium import ObjectInfo
from kvstore.objects.naming import DROPS, OTHER, drop_key, fan_out, holds_records, name_of
from kvstore.objects.pack import PackError
from kvstore.objects.store import ObjectStore
from kvstore.objects.survey import Candidate, listing_call

_PREFIX_BYTES: Final = 16  # of a core name; a drop of exactly that knows where to look
_MAX_PREFIX_BYTES: Final = 255
_LOOK_EVERY_S: Final = 60.0  # for drops that another process noted and did not finish
_BATCH: Final = 500

_SAME_SECOND_S: Final = 1.0
"""Media tell whole seconds in one answer and less in another; under a dropped prefix nothing is written again."""


@dataclass(slots=True)
class _Drop:
    prefix: bytes
    asked_at: float
    places: Iterator[str]


class Drops:
    """Unfinished drops of one medium.  Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[bytes, _Drop] = {}
        self._looked_at = -float("inf")

    def request(self, prefix: bytes) -> None:
        """Note a prefix on the medium, so that a later process goes on where this one stops."""
        if self._store.context.read_only:
            return
        key = drop_key(prefix)
        call = self._store.call()
        self._store.medium.write(key, [prefix], call, once=False, blocks=0)
        for info in self._store.medium.entries(key, call):  # a listing, as the records' ages come from one too
            self._add(prefix, info.modified)

    def _add(self, prefix: bytes, asked_at: float) -> None:
        with self._lock:
            self._open[prefix] = _Drop(prefix, asked_at, _places(prefix))

    def reclaim(self, budget_s: float) -> None:
        """Work on the drops for about that long, at least one listing."""
        if self._store.context.read_only:
            return
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._find()
        end = time.monotonic() + budget_s
        while self._open:
            drop = next(iter(self._open.values()))
            place = next(drop.places, None)
            if place is None:
                self._store.medium.remove([drop_key(drop.prefix)], self._store.call())
                with self._lock:
                    if self._open.get(drop.prefix) is drop:
                        del self._open[drop.prefix]
            else:
                self._clear(drop, place)
            if time.monotonic() >= end:
                return

    def _find(self) -> None:
        """Take over drops that were noted and not finished."""
        for info in list(self._store.medium.entries(DROPS, self._store.call())):
            body = self._store.medium.read(info.key, self._store.call())
            if body is None or body.nbytes > _MAX_PREFIX_BYTES:
                continue
            with body:
                prefix = bytearray(body.nbytes)
                body.read_into(memoryview(prefix))
            if bytes(prefix) not in self._open and drop_key(bytes(prefix)) == info.key:
                self._add(bytes(prefix), info.modified)

    def _clear(self, drop: _Drop, place: str) -> None:
        batch: list[Candidate] = []
        for info in self._store.medium.entries(place, listing_call()):
            old = info.modified <= drop.asked_at + _SAME_SECOND_S
            if old and holds_records(info.key) and self._falls(info, drop.prefix):
                charged = self._store.space.charge(info.nbytes)
                batch.append(Candidate(info.modified, info.key, charged, info.blocks))
            if len(batch) >= _BATCH:
                self._store.space.evictor.discard(batch, self._store.call())
                batch = []
        if batch:
            self._store.space.evictor.discard(batch, self._store.call())

    def _falls(self, info: ObjectInfo, prefix: bytes) -> bool:
        """Whether the object's records have the prefix; those of one object share what a drop names."""
        name = name_of(info.key)
        if name is None:
            try:
                entries = self._store.index(info.key, info.nbytes, self._store.call())
            except PackError:
                return False
            name = entries[-1].name if entries else b""
        if not name.startswith(prefix):
            return False
        self._store.remembered.lost(name)
        return True


def _places(prefix: bytes) -> Iterator[str]:
    """Key prefixes under which names with the prefix may lie."""
    if len(prefix) >= _PREFIX_BYTES:
        for spread in range(256):
            yield fan_out(prefix[:_PREFIX_BYTES], spread)
        yield OTHER
    else:
        yield ""

"""Puts: runs of consecutive blocks become packs, everything else an object each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.backend import PutItem
from kvstore.errors import (
    BackendError,
    BackendFullError,
    BackendPermissionError,
    BackendTimeoutError,
    NotSupportedError,
)
from kvstore.objects.cuts import cut
from kvstore.objects.naming import NAME_BYTES, SEQUENCE_BYTES, key_of
from kvstore.objects.pack import index_room, seal
from kvstore.objects.remembered import StoredObject
from kvstore.objects.settings import MAX_PACK_BYTES
from kvstore.objects.store import ObjectStore
from kvstore.objects.survey import Candidate
from kvstore.types import Call, PutStatus

_STATUS: tuple[tuple[type[BackendError], PutStatus], ...] = (
    (BackendFullError, PutStatus.FULL),
    (BackendTimeoutError, PutStatus.TIMEOUT),
    (BackendPermissionError, PutStatus.DENIED),
    (NotSupportedError, PutStatus.READ_ONLY),
    (BackendError, PutStatus.UNAVAILABLE),
)


_NO_AGE_S: Final = 1e-3  # not worth a system call or request

_SMALL_PART: Final = 8
"""A pack takes at most this part of the capacity, so that evicting one does not empty a small store."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The items of one object, in the order of their positions; ``at`` are their indices in the call."""

    items: tuple[PutItem, ...]
    at: tuple[int, ...]
    nbytes: int = field(init=False)
    """Length of the object."""

    def __post_init__(self) -> None:
        nbytes = index_room(len(self.items), 0) + sum(len(i.name) + i.nbytes for i in self.items)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def end(self) -> bytes:
        """The name the object is stored under."""
        return self.items[-1].name

    def halves(self) -> tuple[Piece, Piece]:
        """The two next smaller packs."""
        k = len(self.items) // 2
        return Piece(self.items[:k], self.at[:k]), Piece(self.items[k:], self.at[k:])


def runs_of(items: Sequence[PutItem]) -> list[list[int]]:
    """Indices of the items that follow each other in one sequence, in order; each once."""
    by_parent: dict[tuple[bytes, int], list[int]] = {}
    for i, item in enumerate(items):
        if item.hint.parent:
            by_parent.setdefault((item.hint.parent, item.hint.position), []).append(i)
    used: set[int] = set()
    runs: list[list[int]] = []
    for i in sorted(range(len(items)), key=lambda k: items[k].hint.position):
        if i in used:
            continue
        run: list[int] = []
        following: int | None = i
        while following is not None:
            used.add(following)
            run.append(following)
            following = _next(items, following, by_parent, used)
        runs.append(run)
    return runs


def _next(
    items: Sequence[PutItem], i: int, by_parent: dict[tuple[bytes, int], list[int]], used: set[int]
) -> int | None:
    item = items[i]
    if item.hint.position < 0 or len(item.name) != NAME_BYTES:
        return None
    for k in by_parent.get((item.name, item.hint.position + 1), ()):
        name = items[k].name
        if k not in used and len(name) == NAME_BYTES and name[:SEQUENCE_BYTES] == item.name[:SEQUENCE_BYTES]:
            return k
    return None


def pieces_of(items: Sequence[PutItem], pack_blocks: int, most_bytes: int = MAX_PACK_BYTES) -> list[Piece]:
    """Cut the items of a call into objects, tails first as they came, so that a tail is the older one."""
    pieces: list[Piece] = []
    for run in runs_of(items):
        start = max(0, items[run[0]].hint.position)
        for a, b in cut(start, start + len(run), pack_blocks):
            at = tuple(run[a - start : b - start])
            pieces.extend(_small_enough(Piece(tuple(items[i] for i in at), at), most_bytes))
    return pieces[::-1]


def _small_enough(piece: Piece, most_bytes: int) -> list[Piece]:
    if len(piece.items) == 1 or piece.nbytes <= most_bytes:
        return [piece]
    first, second = piece.halves()
    return _small_enough(first, most_bytes) + _small_enough(second, most_bytes)


class Writer:
    """The write side of one store; thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Write one object per pack, several at once; a failing object fails its own records only."""
        first: dict[bytes, int] = {}
        for i, item in enumerate(items):
            first.setdefault(item.name, i)
        chosen = sorted(first.values())
        statuses = [PutStatus.EXISTS] * len(items)
        capacity = self._store.context.capacity_bytes
        most_bytes = MAX_PACK_BYTES if capacity is None else min(MAX_PACK_BYTES, capacity // _SMALL_PART)
        pieces = pieces_of([items[i] for i in chosen], self._store.pack_blocks, most_bytes)

        for piece in reversed(pieces):
            self._store.ages.born(piece.end, piece.items[0].hint.parent, len(piece.items))

        def write(piece: Piece) -> None:
            status = self._write(piece, call)
            for k in piece.at:
                statuses[chosen[k]] = status

        self._store.fanout.each(write, pieces)
        for i, item in enumerate(items):
            if first[item.name] != i and statuses[first[item.name]] is not PutStatus.STORED:
                statuses[i] = statuses[first[item.name]]
        return statuses

    def _write(self, piece: Piece, call: Call) -> PutStatus:
        if call.stop():
            return PutStatus.TIMEOUT
        try:
            return self._publish(piece, call)
        except BackendError as e:
            return next(status for kind, status in _STATUS if isinstance(e, kind))

    def _publish(self, piece: Piece, call: Call) -> PutStatus:
        store, began = self._store, time.monotonic()
        if self._known(piece, call):
            return PutStatus.EXISTS
        if not store.space.fits(piece.nbytes):
            return PutStatus.TOO_LARGE
        buffers = [seal(piece.items), *(buffer for item in piece.items for buffer in item.buffers)]
        key = key_of(piece.end)
        blocks = len(piece.items)
        if not store.space.write(key, buffers, call, once=True, blocks=blocks):
            there = store.look(piece.end, call)
            if there is not None and there.blocks >= blocks:
                self._found([item.name for item in piece.items], there)
                return PutStatus.EXISTS
            # a damaged object, or the end of this run as it was put before the rest was known
            store.space.write(key, buffers, call, once=False, blocks=blocks, replaces=there)
        self._note(piece, key, call, began)
        return PutStatus.STORED

    def _known(self, piece: Piece, call: Call) -> bool:
        """Whether one object is known to hold all of it, so that nothing needs to be sent.

        What was seen a moment ago is believed; what was seen longer ago is looked at, which costs
        less than sending a pack that is then refused.
        """
        remembered = self._store.remembered
        names = [item.name for item in piece.items]
        objects = {id(o): o for o in map(remembered.where, names)}
        if len(objects) != 1 or (there := next(iter(objects.values()))) is None:
            return False
        if not remembered.present(piece.end):
            found = self._store.look(there.end, call)
            if found is None or found.blocks < there.blocks:
                return False
            there = found
        self._found(names, there)
        return True

    def _found(self, names: Sequence[bytes], there: StoredObject) -> None:
        """A put of what is stored is a use of it."""
        self._store.remembered.note(names, there)
        self._store.ages.used(names[::-1])

    def _note(self, piece: Piece, key: str, call: Call, began: float) -> None:
        """Remember what was written, and give it its place in the order of eviction."""
        store = self._store
        names = [item.name for item in piece.items]
        stored = StoredObject(piece.end, len(names), piece.nbytes, time.time(), written=True)
        store.remembered.lost(piece.end, replaced=True)
        store.remembered.note(names, stored, began)
        if not store.settings.evicts:
            return
        stored.modified = store.ages.born_at(key)
        by_s = time.time() - stored.modified
        if by_s > _NO_AGE_S:
            with contextlib.suppress(BackendError):  # it is stored; only its age is not what it should be
                store.medium.backdate(key, by_s, call)
        store.space.evictor.add(Candidate(stored.modified, key, store.space.charge(piece.nbytes), len(names)))

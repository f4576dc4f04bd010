"""Eviction by age, safe when several processes and machines do it at once."""

from __future__ import annotations

import contextlib
import heapq
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.errors import BackendError
from kvstore.objects.naming import name_of
from kvstore.objects.pack import PackError
from kvstore.objects.survey import CANDIDATES, Candidate, Surveyed
from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.objects.space import Space
    from kvstore.objects.store import ObjectStore

_STEP: Final = 64  # objects removed in one go: one batch request on a bucket


class Evictor:
    """Removes the oldest objects.  Thread-safe.

    Processes that share a medium take victims in the same order, oldest first and then by key, as
    far as the medium keeps the ages; so what two of them evict at once is mostly the same.  Every
    candidate is looked at again before it goes: one that somebody used meanwhile stays, and one
    that somebody else removed counts as room.
    """

    def __init__(self, store: ObjectStore, space: Space) -> None:
        self._store = store
        self._space = space
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._live: dict[str, Candidate] = {}
        self._oldest: list[Candidate] = []  # a heap; entries that are not in ``_live`` are void
        self._horizon = -math.inf  # nothing is known before the first listing
        self._added: dict[str, Candidate] = {}  # since the last listing began
        self._forgotten: set[str] = set()
        self.evicted = 0
        self.rounds = 0
        """How often room was made."""

    # -- candidates

    def begin_listing(self) -> None:
        """From now on remember what is added and forgotten: a listing may or may not come across it."""
        with self._lock:
            self._added = {}
            self._forgotten = set()

    def consider(self, found: Surveyed) -> None:
        """Take candidates from a fresh listing."""
        age_of = self._store.ages.age_of
        aged = [c._replace(modified=age_of(c.key, c.modified)) for c in found.oldest]
        with self._lock:
            live = {c.key: c for c in aged if c.key not in self._forgotten}
            live.update((key, c) for key, c in self._added.items() if c.modified <= found.horizon)
            self._horizon = found.horizon
            self._rebuild(live)

    def _rebuild(self, live: dict[str, Candidate]) -> None:
        self._live = live
        self._oldest = list(live.values())
        heapq.heapify(self._oldest)

    def add(self, candidate: Candidate) -> None:
        """Take an object that was just written or used among the candidates, if it is old enough."""
        with self._lock:
            if candidate.modified > self._horizon:
                return
            self._live[candidate.key] = candidate
            self._added[candidate.key] = candidate
            self._forgotten.discard(candidate.key)
            heapq.heappush(self._oldest, candidate)
            if len(self._live) > 2 * CANDIDATES:
                oldest = heapq.nsmallest(CANDIDATES, self._live.values())
                self._horizon = oldest[-1].modified
                self._added = {}
                self._rebuild({c.key: c for c in oldest})
            elif len(self._oldest) > 4 * CANDIDATES:
                self._rebuild(self._live)

    def forget(self, key: str) -> None:
        """An object is gone."""
        with self._lock:
            self._live.pop(key, None)
            self._added.pop(key, None)
            if len(self._forgotten) < 2 * CANDIDATES:
                self._forgotten.add(key)

    # -- making room

    def make_room(self, needed_bytes: int, ahead_bytes: int) -> bool:
        """Evict until so many bytes fit below the capacity; one caller at a time, the others may find it done.

        Args:
            needed_bytes: What is to be written.
            ahead_bytes: What to free beyond that once something must be evicted.

        Returns:
            Whether it fitted at some moment meanwhile, though others may have taken the room since;
            False when all was tried and nothing more can be evicted.
        """
        space = self._space
        fitted = False
        with self._making_room, contextlib.suppress(BackendError):
            if space.excess(needed_bytes) > 0:
                space.look_again()
            fitted = space.excess(needed_bytes) <= 0
            if not fitted:
                self._evict_while(lambda _: space.excess(needed_bytes) + ahead_bytes)
                fitted = space.excess(needed_bytes) <= 0
        return fitted

    def free(self, wanted_bytes: int, rounds: int) -> bool:
        """Evict so many bytes from a medium that said it is full, whatever the counts say.

        Args:
            wanted_bytes: What to free.
            rounds: :attr:`rounds` before the write that failed: when it has grown since, another
                caller made room and the write may be tried again.

        Returns:
            Whether anything was freed.
        """
        with self._making_room, contextlib.suppress(BackendError):
            if self.rounds == rounds:
                self._evict_while(lambda freed: wanted_bytes - freed)
        return self.rounds != rounds

    def _evict_while(self, left: Callable[[int], int]) -> None:
        """Evict until ``left(freed)`` is nothing, or nothing is there after listing again."""
        call = self._store.call()
        looked = False
        freed = 0
        while (wanted := left(freed)) > 0 and not call.stop():
            candidates = self._take(wanted)
            if candidates:
                freed += self._evict(self._still_old(candidates, call), call)
            elif looked:
                return
            else:
                self._space.look()
                looked = True

    def _take(self, wanted_bytes: int) -> list[Candidate]:
        """Take the oldest candidates, worth about so many bytes."""
        victims: list[Candidate] = []
        with self._lock:
            while self._oldest and wanted_bytes > 0 and len(victims) < _STEP:
                candidate = heapq.heappop(self._oldest)
                if self._live.get(candidate.key) is candidate:
                    del self._live[candidate.key]
                    victims.append(candidate)
                    wanted_bytes -= candidate.nbytes
        return victims

    def _still_old(self, candidates: Sequence[Candidate], call: Call) -> dict[Candidate, int]:
        """Look at candidates again; those that are gone or were used meanwhile are let off.

        Returns:
            The others, with the records that each holds.
        """
        victims: dict[Candidate, int] = {}

        def look(candidate: Candidate) -> None:
            info = self._store.medium.head(candidate.key, call)
            if info is None:
                self._gone(candidate)
                return
            modified = self._store.ages.age_of(candidate.key, info.modified)
            if modified <= candidate.modified:
                victims[candidate] = info.blocks
                return
            self.add(candidate._replace(modified=modified))

        self._store.fanout.each(look, candidates)
        return victims

    def _gone(self, candidate: Candidate) -> None:
        """Somebody else removed it, which makes room as well as an eviction of ours."""
        end = name_of(candidate.key)
        if end is not None:
            self._store.remembered.lost(end)
        self._space.removed(candidate.key, candidate.nbytes, candidate.blocks)
        self.rounds += 1

    def discard(self, victims: Sequence[Candidate], call: Call) -> int:
        """Remove objects without calling it eviction; returns the bytes freed."""
        if not victims:
            return 0
        for victim in victims:
            end = name_of(victim.key)
            if end is not None:
                self._store.remembered.lost(end)
        self._store.medium.remove([victim.key for victim in victims], call)
        for victim in victims:
            self._space.removed(victim.key, victim.nbytes, victim.blocks)
        return sum(victim.nbytes for victim in victims)

    def _evict(self, victims: Mapping[Candidate, int], call: Call) -> int:
        """Evict objects, tell the core their names; returns the bytes freed."""
        names = [name for victim, blocks in victims.items() for name in self._names(victim, blocks, call)]
        freed = self.discard(list(victims), call)
        with self._lock:
            self.evicted += len(names)
            self.rounds += bool(victims)
        if names:
            self._store.context.removed(names)
        return freed

    def _names(self, victim: Candidate, blocks: int, call: Call) -> list[bytes]:
        """Names that go with an object: remembered, or read from its index."""
        end = name_of(victim.key)
        lost = self._store.remembered.lost(end) if end is not None else []
        if end is not None and blocks == 1:
            return [end]
        if lost and len(lost) == blocks:
            return lost
        with contextlib.suppress(PackError, BackendError):
            entries = self._store.index_of(victim.key, call)
            names = [entry.name for entry in entries or ()]
            if end is None and names:
                self._store.remembered.lost(names[-1])
            return names
        return lost

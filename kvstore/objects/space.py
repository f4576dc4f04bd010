"""Room on the medium: what is counted, and how it is kept within the capacity."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.backend import Usage
from kvstore.errors import BackendError, BackendFullError
from kvstore.objects.evictor import Evictor
from kvstore.objects.medium import ObjectInfo
from kvstore.objects.naming import key_of
from kvstore.objects.remembered import StoredObject
from kvstore.objects.survey import Surveyed, round_up, survey
from kvstore.objects.tally import Tally, Write
from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.objects.store import ObjectStore

_RETRIES: Final = 2  # after making room on a medium that said it is full
_AHEAD_PART: Final = 100  # evict this part of the capacity more than needed, so that not every put has to
_CHEAP_SURVEY_S: Final = 0.03  # a listing this quick is done whenever somebody wants to know
_SURVEY_SHARE: Final = 20  # otherwise listings by time take at most a twentieth of it

_SHARE_PART: Final = 50
"""Part of the capacity that a process may write before it lists again: others may have written as much."""

_ALONE_PART: Final = 8
"""The same for a process that found for some time, listing after listing, that nobody else writes."""

_ALONE_S: Final = 10.0

_WAITED_SURVEY_S: Final = 1.0
"""Puts wait for a listing this quick; a longer one runs beside them, and the capacity holds less sharply."""


class Space:
    """Bytes and records of one medium, as far as this process knows them.  Thread-safe.

    Own writes and removals are counted at once; what other processes did is learnt by listings.
    With a capacity, room is reserved before a write, so one process never goes beyond it.  Each of
    several lists again before it has written its share, a fiftieth of the capacity, since its last
    listing began; so *n* processes stay below ``capacity x (1 + (n - 1) / 50)``: the one that
    listed last knows all but the shares of the others.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._surveying = threading.Lock()
        self._tally = Tally()
        self.evictor = Evictor(store, self)
        self._notes_bytes = 0
        self._share_bytes = self._least_share()
        self._others_at = time.monotonic()  # when something was found that this process did not do
        self._surveyed_at = -float("inf")
        self._surveyed_time = -float("inf")  # by the wall clock
        self._survey_s = float("inf")  # the quickest listing so far

    @property
    def capacity_bytes(self) -> int | None:
        """What may be taken; None when nothing is enforced."""
        return self._store.context.capacity_bytes if self._store.settings.evicts else None

    def charge(self, nbytes: int) -> int:
        """What an object of that length counts."""
        return round_up(nbytes, self._store.settings.charge_bytes)

    def _least_share(self) -> int:
        return (self.capacity_bytes or 0) // _SHARE_PART

    def _overhead_bytes(self) -> int:
        return self._notes_bytes + self._store.medium.overhead_bytes()

    def fits(self, nbytes: int) -> bool:
        """Whether an object of that length can be stored at all."""
        capacity = self._store.context.capacity_bytes
        return capacity is None or self.charge(nbytes) + self._overhead_bytes() <= capacity

    def excess(self, wanted_bytes: int = 0) -> int:
        """Bytes to free before so many more fit; not positive when they do."""
        capacity = self.capacity_bytes
        if capacity is None:
            return 0
        return self._tally.nbytes + self._tally.reserved + self._overhead_bytes() + wanted_bytes - capacity

    # -- writing

    def write(  # noqa: PLR0913 - those of ObjectMedium.write, and what it replaces
        self,
        key: str,
        buffers: Sequence[memoryview | bytes],
        call: Call,
        *,
        once: bool,
        blocks: int,
        replaces: StoredObject | None = None,
    ) -> bool:
        """Write an object into reserved room; on a full medium make room and try again.

        Raises:
            BackendFullError: There is no room and none could be made.
        """
        charged = self.charge(sum(memoryview(b).nbytes for b in buffers))
        write = Write(key, charged, blocks, charged)
        if replaces is not None:
            write.records -= replaces.blocks
            write.nbytes -= self.charge(replaces.nbytes)
        self._reserve(write, call)
        written = False
        try:
            for attempt in range(_RETRIES + 1):
                rounds = self.evictor.rounds
                try:
                    written = self._store.medium.write(key, buffers, call, once=once, blocks=blocks)
                    break
                except BackendFullError:
                    last = attempt == _RETRIES or call.stop() or not self._store.settings.evicts
                    if last or not self.evictor.free(2 * charged, rounds):
                        raise
        finally:
            self._tally.end(write, written=written)
        return written

    def _reserve(self, write: Write, call: Call) -> None:
        """Take room for a write, made by evicting if need be; other writers may take it first, and more is made."""
        capacity = self.capacity_bytes
        if capacity is None:
            self._tally.begin(write, None)
            return
        self._look_in_time(write.charged)
        while True:
            rounds = self.evictor.rounds
            if self._tally.begin(write, capacity - self._overhead_bytes()):
                return
            fitted = self.evictor.make_room(write.charged, capacity // _AHEAD_PART)
            if call.stop() or not (fitted or self.evictor.rounds != rounds):
                break
        msg = f"tier {self._store.context.tier!r}: {capacity} bytes are taken and nothing more can be evicted"
        raise BackendFullError(msg)

    def _look_in_time(self, charged: int) -> None:
        """List before this process has written more since the last listing than others are to reckon with."""
        if self._surveyed_at == -float("inf"):
            self._look_if(lambda: self._surveyed_at == -float("inf"))
        elif self._spent(charged) and self._survey_s <= _WAITED_SURVEY_S:
            self._look_if(lambda: self._spent(charged))

    def _spent(self, charged: int) -> bool:
        unseen = self._tally.unseen
        return unseen > 0 and unseen + self._tally.reserved + charged > self._share_bytes

    def removed(self, key: str, charged: int, blocks: int) -> None:
        """An object is gone."""
        self.evictor.forget(key)
        self._tally.removed(key, max(1, blocks), charged)

    def lost(self, there: StoredObject) -> None:
        """An object that was known is not there any more; it is taken off if it was counted."""
        if there.written or there.modified <= self._surveyed_time:
            self.removed(key_of(there.end), self.charge(there.nbytes), there.blocks)

    # -- knowing

    def look(self) -> Surveyed:
        """List the medium now and take over what it says.

        Raises:
            BackendError: The medium failed.
        """
        with self._surveying:
            return self._look()

    def _look_if(self, wanted: Callable[[], bool]) -> None:
        """List when it is still wanted once this caller's turn comes: another may have listed meanwhile."""
        with self._surveying:
            if wanted():
                self._look()

    def _look(self) -> Surveyed:
        unseen = self._tally.unseen
        began = time.time()
        self._tally.begin_listing()
        self.evictor.begin_listing()
        try:
            found = self._survey()
        except BaseException:
            self._tally.give_up_listing()
            raise
        agreed = self._tally.end_listing(found.records, found.nbytes)
        self._set_share(unseen, agreed=agreed)
        self._notes_bytes = found.notes_bytes
        self._surveyed_at = time.monotonic()
        self._surveyed_time = began
        self._survey_s = min(self._survey_s, found.seconds)
        self.evictor.consider(found)
        return found

    def _survey(self) -> Surveyed:
        remembered = self._store.remembered
        believed = remembered.objects()
        began = time.monotonic()

        def seen(info: ObjectInfo, charged: int) -> int:
            there = believed.pop(info.key, None)
            self._tally.saw(info.key, charged)
            return info.blocks or (there.blocks if there is not None and there.nbytes == info.nbytes else 0)

        found = survey(self._store.medium, self.charge, seen)
        for there in believed.values():  # another process removed it
            remembered.lost(there.end, began)
        return found

    def _set_share(self, unseen: int, *, agreed: bool) -> None:
        """Who is alone lists less and less often; who is not, before others could write much."""
        if not agreed:
            self._others_at = time.monotonic()
        if not agreed or time.monotonic() - self._others_at < _ALONE_S:
            self._share_bytes = self._least_share()
        elif 2 * unseen >= self._share_bytes:
            self._share_bytes = min(2 * self._share_bytes, (self.capacity_bytes or 0) // _ALONE_PART)

    def look_again(self) -> None:
        """List once more before evicting, where that is cheap and others may have evicted meanwhile."""
        if self._survey_s <= _CHEAP_SURVEY_S and self._share_bytes <= self._least_share():
            self.look()

    def _wants_look(self) -> bool:
        """Whether the counts may be so old that a listing is due."""
        age = time.monotonic() - self._surveyed_at
        interval = self._store.settings.survey_interval_s
        if self.capacity_bytes is None and not interval:
            return False
        if age < _SURVEY_SHARE * min(self._survey_s, 3600.0) and self._surveyed_at > 0:
            return False
        due = bool(interval) and age >= interval
        return due or age == float("inf") or (self.capacity_bytes is not None and self._spent(0))

    def maintain(self) -> None:
        """List when that is due, and evict what other processes wrote beyond the capacity."""
        if self._wants_look():
            self.look()
        self._trim()

    def _trim(self) -> None:
        if self.excess() > 0 and not self._store.context.read_only:
            self.evictor.make_room(0, 0)

    def usage(self) -> Usage:
        """Counted so far; listed again first where that takes next to no time."""
        settings = self._store.settings
        never = self._surveyed_at == -float("inf")
        counts = bool(settings.survey_interval_s) or self.capacity_bytes is not None
        if counts and (never or self._survey_s <= _CHEAP_SURVEY_S):
            with contextlib.suppress(BackendError):
                self.look()
                self._trim()
        nbytes = self._tally.nbytes
        return Usage(
            records=self._tally.records,
            payload_bytes=nbytes,
            file_bytes=nbytes + self._overhead_bytes() if settings.charge_bytes > 1 else 0,
            capacity_bytes=self._store.context.capacity_bytes or 0,
            evicted=self.evictor.evicted,
        )

"""Counting what lies on a medium, also while it is listed: nothing twice, nothing left out."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

_LISTED: Final = 1 << 17
"""Keys of one listing that are remembered while it runs, 8 MB; what is removed of more than that still counts."""


@dataclass(slots=True, eq=False)
class Write:
    """One write under way.

    Attributes:
        key: Of the object.
        charged: What the object counts.
        records: Records that it adds.
        nbytes: Bytes that it adds: less than ``charged`` when it replaces another object.
        seen: A listing came across it.
        ended: It was published.
        counted: A listing counted it before it ended.
    """

    key: str
    charged: int
    records: int
    nbytes: int
    seen: bool = False
    ended: bool = False
    counted: bool = False


class Tally:
    """Records and bytes of one medium as this process knows them.  Thread-safe.

    A listing replaces the counts.  Writes and removals of this process that it may or may not have
    seen are told apart by key; those of other processes count as the listing found them.

    Attributes:
        records: Records on the medium.
        nbytes: Their charged bytes.
        reserved: Bytes of writes that are under way and not in ``nbytes``.
        unseen: Bytes that this process wrote since the last listing began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.records = 0
        self.nbytes = 0
        self.reserved = 0
        self.unseen = 0
        self._writing: list[Write] = []
        self._watched: dict[str, list[Write]] = {}  # writes that a running listing may come across
        self._listed: set[str] | None = None  # keys that a running listing came across
        self._taken_back = (0, 0)  # records and bytes that were listed and then removed

    def begin(self, write: Write, room_bytes: int | None) -> bool:
        """Reserve room for a write; False when less than its charge is left of ``room_bytes``."""
        with self._lock:
            if room_bytes is not None and self.nbytes + self.reserved + write.charged > room_bytes:
                return False
            self.reserved += write.charged
            self._writing.append(write)
            if self._listed is not None:
                self._watched.setdefault(write.key, []).append(write)
            return True

    def end(self, write: Write, *, written: bool) -> None:
        """Give the reserved room back and count what was written."""
        with self._lock:
            self._writing.remove(write)
            self.unseen += write.charged if written else 0
            if write.counted:
                return
            self.reserved -= write.charged
            if written:
                write.ended = True
                self.records += write.records
                self.nbytes += write.nbytes

    def removed(self, key: str, records: int, nbytes: int) -> None:
        """An object is gone."""
        with self._lock:
            self.records = max(0, self.records - records)
            self.nbytes = max(0, self.nbytes - nbytes)
            if self._listed is not None and key in self._listed:
                self._listed.discard(key)
                self._taken_back = (self._taken_back[0] + records, self._taken_back[1] + nbytes)

    # -- listing

    def begin_listing(self) -> None:
        """From now on writes and removals are compared with what a listing comes across."""
        with self._lock:
            self._listed = set()
            self._taken_back = (0, 0)
            self._watched = {}
            for write in self._writing:
                self._watched.setdefault(write.key, []).append(write)
            self.unseen = 0

    def saw(self, key: str, charged: int) -> None:
        """The listing came across an object."""
        with self._lock:
            if self._listed is not None and len(self._listed) < _LISTED:
                self._listed.add(key)
            for write in self._watched.get(key, ()):
                write.seen = write.seen or write.charged == charged

    def end_listing(self, records: int, nbytes: int) -> bool:
        """Take over what a listing found; returns whether it was what had been counted."""
        with self._lock:
            before = self.nbytes
            self.records = records - self._taken_back[0]
            self.nbytes = nbytes - self._taken_back[1]
            for write in (write for writes in self._watched.values() for write in writes):
                if write.ended and not write.seen:
                    self.records += write.records
                    self.nbytes += write.nbytes
            under_way = 0
            for write in self._writing:
                if write.seen and not write.counted:
                    write.counted = True  # published, and its thread has not come to say so
                    self.reserved -= write.charged
                    under_way += write.nbytes
            self._stop_listing()
            return self.nbytes - under_way == before

    def give_up_listing(self) -> None:
        """The listing failed: what was counted stays."""
        with self._lock:
            self._stop_listing()

    def _stop_listing(self) -> None:
        self._listed = None
        self._watched = {}

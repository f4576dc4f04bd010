"""What happened to blocks of one tier, as far as this process knows: the memory behind ``explain``."""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LIMIT: Final = 1 << 14
"""Digests a tier.  Entry, digest and their share of the notes take about 170 bytes: 2.8 MiB."""

_FORGOTTEN_SHARE: Final = 8  # of the limit: what goes at once, because walking over the gaps of a dict is slow


class Event(enum.Enum):
    """What can happen to a block in a tier; each is rare for a block, or told once for a whole batch."""

    STORED = "stored"
    EVICTED = "evicted"
    DELETED = "deleted"
    CLEARED = "cleared"
    QUEUE_FULL = "queue full"
    REFUSED = "refused"
    DROPPED = "dropped"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Note:
    """The newest event of a block.

    Attributes:
        event: What happened.
        at: Unix time in seconds.
        detail: More about it, such as the status with which a medium refused; may be empty.
    """

    event: Event
    at: float
    detail: str = ""


class History:
    """The newest event of each block, oldest forgotten first; thread-safe, never waits for a medium.

    It holds what this process did and was told: other processes may have stored or evicted since.

    Args:
        limit: Blocks remembered at most.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._notes: dict[bytes, Note] = {}
        self._cleared: Note | None = None

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def cleared(self) -> Note | None:
        """The newest clear that this process made or noticed; None when there was none."""
        return self._cleared

    def note(self, digests: Sequence[bytes], event: Event, detail: str = "") -> None:
        """Something happened to these blocks now; replaces what was known of them."""
        if not digests:
            return
        note = Note(event, time.time(), detail)
        with self._lock:
            notes = self._notes
            for digest in digests:
                notes.pop(digest, None)  # so that it counts as the newest
                notes[digest] = note
            excess = len(notes) - self._limit
            if excess > 0:
                for oldest in list(itertools.islice(notes, excess + self._limit // _FORGOTTEN_SHARE)):
                    del notes[oldest]

    def clear(self, detail: str = "") -> None:
        """The whole tier was emptied: what was stored there is gone, and older stories are over."""
        note = Note(Event.CLEARED, time.time(), detail)
        with self._lock:
            self._cleared = note
            held = (Event.STORED, Event.CLEARED)
            self._notes = dict.fromkeys((d for d, known in self._notes.items() if known.event in held), note)

    def of(self, digests: Sequence[bytes]) -> list[Note | None]:
        """What is known of each of these blocks; None where nothing is."""
        with self._lock:
            return [self._notes.get(digest) for digest in digests]

"""What was moved since somebody last asked, in the form that SGLang's metrics take."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

_KEPT: Final = 1024  # transfers of one kind; SGLang asks every scheduler tick, so only an unread log fills up


@dataclass(frozen=True, slots=True)
class Transfer:
    """One batch that was moved.

    Attributes:
        n_pages: Pages that were moved.
        nbytes: Bytes of them.
        seconds: How long it took.
    """

    n_pages: int
    nbytes: int
    seconds: float

    @property
    def gigabytes_per_s(self) -> float:
        """Speed in 10^9 bytes per second."""
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


class TransferLog:
    """The newest transfers of each direction; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: deque[Transfer] = deque(maxlen=_KEPT)
        self._saves: deque[Transfer] = deque(maxlen=_KEPT)

    def note_load(self, transfer: Transfer) -> None:
        """Pages came from the store."""
        self._note(self._loads, transfer)

    def note_save(self, transfer: Transfer) -> None:
        """Pages went to the store."""
        self._note(self._saves, transfer)

    def _note(self, log: deque[Transfer], transfer: Transfer) -> None:
        if transfer.n_pages:
            with self._lock:
                log.append(transfer)

    def drain(self) -> tuple[list[Transfer], list[Transfer]]:
        """Take loads and saves out."""
        with self._lock:
            taken = list(self._loads), list(self._saves)
            self._loads.clear()
            self._saves.clear()
        return taken

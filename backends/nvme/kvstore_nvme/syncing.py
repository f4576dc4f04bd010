"""Group sync: writers that end at about the same time share one trip to the medium."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final


class GroupSync:
    """Runs ``sync`` so that every caller's earlier writes are covered by one that began later.

    Args:
        sync: Brings a region's file to the medium.
    """

    def __init__(self, sync: Callable[[int], None]) -> None:
        self._sync: Final = sync
        self._lock: Final = threading.Lock()
        self._arrivals: dict[int, int] = {}
        self._covered: dict[int, int] = {}
        self._turns: dict[int, threading.Lock] = {}

    def run(self, region: int) -> None:
        """Return when what was written to the region before the call is on the medium.

        Raises:
            OSError: The medium failed.
        """
        with self._lock:
            arrival = self._arrivals[region] = self._arrivals.get(region, 0) + 1
            turn = self._turns.setdefault(region, threading.Lock())
        with turn:
            if self._covered.get(region, 0) >= arrival:
                return
            with self._lock:
                covered = self._arrivals[region]
            self._sync(region)
            self._covered[region] = covered

"""Counters that many threads add to."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Counting(Generic[T]):
    """Guards an instance of a dataclass of integers; thread-safe.

    Args:
        values: The counters at their start.
    """

    def __init__(self, values: T) -> None:
        self._lock = threading.Lock()
        self._values: Any = values

    def add(self, **amounts: int) -> None:
        """Add to several counters at once, so that sums stay consistent."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._values, name, getattr(self._values, name) + amount)

    def snapshot(self) -> T:
        """A consistent copy."""
        with self._lock:
            copy: T = dataclasses.replace(self._values)
        return copy

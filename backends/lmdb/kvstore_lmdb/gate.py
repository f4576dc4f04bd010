"""A counter of running operations that close and fork can wait on."""

from __future__ import annotations

import threading
import time
from typing import Final


class Gate:
    """Lets operations in until it is shut; whoever shuts it can wait for those inside.

    A memory map must not vanish under a running reader, and a fork must not copy a transaction.
    Thread-safe; about a microsecond a passage.
    """

    def __init__(self) -> None:
        self._changed: Final = threading.Condition(threading.Lock())
        self._inside = 0
        self._shut = False
        self._paused = False

    @property
    def inside(self) -> int:
        """Operations running now."""
        return self._inside

    def enter(self) -> bool:
        """Start an operation; False when the gate is shut.  Every True needs a :meth:`leave`."""
        with self._changed:
            while self._paused and not self._shut:
                self._changed.wait(1.0)
            if self._shut:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """End an operation."""
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()

    def wait_empty(self, timeout_s: float | None) -> bool:
        """Wait until nobody is inside; False when ``timeout_s`` passes first (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)

    def pause(self, timeout_s: float) -> bool:
        """Hold newcomers back and wait for those inside; undo with :meth:`resume` in any case."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._paused = True
            return self._changed.wait_for(lambda: not self._inside, max(0.0, end - time.monotonic()))

    def resume(self) -> None:
        """Let newcomers in again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

"""Work that is submitted, done in threads, and asked about later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

logger = logging.getLogger("kvstore.lmcache")

R = TypeVar("R")


class TaskBoard(Generic[R]):
    """Runs tasks in threads and keeps each result until it is taken, once; thread-safe.

    Args:
        ids: Where task numbers come from; boards of one adapter share it.
        threads: Threads that run tasks.
        notify: Called after each result, from a thread of the board.
        name: Prefix of the threads' names.
    """

    def __init__(self, ids: Iterator[int], threads: int, notify: Callable[[], None], name: str) -> None:
        self._ids: Final = ids
        self._notify: Final = notify
        self._lock: Final = threading.Lock()
        self._results: dict[int, R] = {}
        self._pool: Final = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def submit(self, work: Callable[[], R], failed: R) -> int:
        """Start a task and return its number at once.

        Args:
            work: Runs in a thread.
            failed: The result if ``work`` raises, or if the board is closed.
        """
        with self._lock:
            task = next(self._ids)
        try:
            self._pool.submit(self._run, task, work, failed)
        except RuntimeError:  # closed
            self._post(task, failed)
        return task

    def take(self, task: int) -> R | None:
        """The result of a task, once; None while it runs."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, R]:
        """The results of all ended tasks that were not taken."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """Wait for the tasks that run, drop those that wait; idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, task: int, work: Callable[[], R], failed: R) -> None:
        try:
            result = work()
        except Exception:
            # The border to LMCache: a task without a result would be waited for forever.
            logger.exception("task %d failed", task)
            result = failed
        self._post(task, result)

    def _post(self, task: int, result: R) -> None:
        with self._lock:
            self._results[task] = result
        self._notify()

"""Doing several requests at once, with the calling thread as one of the workers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from kvstore.errors import ClosedError

T = TypeVar("T")

_CLOSE_S: Final = 1.0  # close() as a whole has 5 s


class _Batch(Generic[T]):
    """Work of one call: taken item by item by whichever thread is free."""

    def __init__(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        self._work = work
        self._items = items
        self._lock = threading.Lock()
        self._taken = 0
        self._running = 0
        self._quiet = threading.Condition(self._lock)
        self._stopped = False
        self.error: BaseException | None = None

    def _take(self) -> T | None:
        with self._lock:
            if self._stopped or self._taken == len(self._items):
                return None
            item = self._items[self._taken]
            self._taken += 1
            self._running += 1
            return item

    def help(self) -> None:
        """Work on items until none is left; what an item raises ends the batch and is kept."""
        while (item := self._take()) is not None:
            error: BaseException | None = None
            try:
                self._work(item)
            except BaseException as e:  # noqa: BLE001 - border: raised in the thread that owns the call
                error = e
            with self._lock:
                self._running -= 1
                if error is not None:
                    self._stopped = True
                    self.error = self.error or error
                    error = None
                self._quiet.notify_all()

    def wait(self, until: float | None) -> bool:
        """Wait for what other threads are still working on; False when ``until`` came first."""
        with self._lock:
            left = None if until is None else max(0.0, until - time.monotonic())
            ended = self._quiet.wait_for(lambda: not self._running, left)
            self._stopped = True
            return ended


class Fanout:
    """A few daemon threads, started when needed, that help callers with their batches.

    The calling thread works too, so a call never waits for a free thread and a stuck thread of the
    pool costs others nothing but its help.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._most = threads
        self._batches: queue.SimpleQueue[_Batch[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._closed = False

    def each(self, work: Callable[[T], None], items: Iterable[T], *, until: float | None = None) -> bool:
        """Call ``work`` for each item, several at a time, in about the order of the items.

        Args:
            work: What to do; an exception stops the batch and is raised here.
            items: Arguments, none of them None.
            until: Stop waiting at this ``time.monotonic()`` value.  Without it the method returns
                when every started item has ended, so buffers of the caller are never used later.

        Returns:
            False when it stopped waiting.
        """
        todo = list(items)
        if not todo:
            return True
        batch = _Batch(work, todo)
        if len(todo) > 1:
            self._call_for_help(batch, min(len(todo), self._most) - 1)
        batch.help()
        try:
            ended = batch.wait(until)
        except BaseException:  # interrupted: what still runs may hold the caller's buffers
            batch.wait(None)
            raise
        error, batch.error = batch.error, None
        if error is None:
            return ended
        try:
            raise error
        finally:
            del error  # its frames hold this one: what they hold would stay until the garbage collector comes

    def background(self, work: Callable[[], None]) -> None:
        """Do something in one of the threads; nobody waits, so ``work`` must not raise."""
        self._call_for_help(_Batch(lambda _: work(), [0]), 1)

    def _call_for_help(self, batch: _Batch[Any], threads: int) -> None:
        with self._lock:
            if self._closed:
                msg = f"{self._name} is closed"
                raise ClosedError(msg)
            for _ in range(threads):
                self._batches.put(batch)
            missing = min(self._most, self._busy + threads) - len(self._threads)
            for _ in range(missing):
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            with self._lock:
                self._busy += 1
            batch.help()
            with self._lock:
                self._busy -= 1

    def close(self) -> None:
        """End the threads; one that is stuck ends with the process."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._batches.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

"""Background loads into L1: one daemon thread, started at the first prefetch."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from kvstore.errors import ClosedError

Load = Callable[[threading.Event], int]


class _CancellableFuture(Future[int]):
    """A future that can be cancelled while its load runs; the load then stops at its next step."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelling = threading.Event()

    def cancel(self) -> bool:
        self.cancelling.set()
        return super().cancel()  # never marked running, so this works until there is a result


class Prefetcher:
    """Runs loads one after the other; thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[_CancellableFuture, Load] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, load: Load) -> Future[int]:
        """Queue a load."""
        future = _CancellableFuture()
        with self._lock:
            if self._closed:
                msg = "the cache is closed; open a cache again to prefetch"
                raise ClosedError(msg)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._waiting.put((future, load))
        return future

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, load = task
            if future.cancelled():
                continue
            # a cancel may come at any time: what it finds finished or set already is of no interest
            with contextlib.suppress(InvalidStateError):
                try:
                    future.set_result(load(future.cancelling))
                except InvalidStateError:
                    raise
                except Exception as e:  # noqa: BLE001 - border: handed to whoever waits for the future
                    future.set_exception(e)

    def close(self) -> None:
        """Cancel what waits, and let the thread end."""
        with self._lock:
            self._closed = True
            thread = self._thread
        waiting = []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._waiting.get_nowait())
        for task in waiting:
            if task is not None:
                task[0].cancel()
        self._waiting.put(None)
        if thread is not None:
            thread.join(1.0)

"""Threads that ask the store, so that an event loop never waits for a medium."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

_CLOSE_S: Final = 5.0  # as long as a cache takes to write out what is queued


class Threads:
    """Two pools of threads, for reads and for writes; thread-safe, made anew in a forked child.

    Args:
        workers: Threads that read, and as many that write.
    """

    def __init__(self, workers: int) -> None:
        self._workers: Final = workers
        self._lock = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._writing: set[Future[Any]] = set()
        self._closed = False
        self._process = os.getpid()

    async def read(self, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
        """Run ``work`` in a thread and wait for it.

        Args:
            work: Runs once, or never if the wait is cancelled before it starts.
            discard: Takes the result when the wait was cancelled while ``work`` ran.

        Raises:
            RuntimeError: Closed.
        """
        future = self._submit("read", work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if discard is not None:
                future.add_done_callback(partial(_discard, discard))
            raise

    async def read_all(self, works: Sequence[Callable[[], T]], discard: Callable[[T], None]) -> list[T]:
        """Run several pieces of work at once and wait for all of them.

        Args:
            works: As for :meth:`read`.
            discard: Takes each result that is not returned: the wait was cancelled, or a piece failed.

        Raises:
            RuntimeError: Closed.
        """
        tasks = [asyncio.ensure_future(self.read(work, discard)) for work in works]
        try:
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(partial(_discard, discard))
            raise

    async def write(self, work: Callable[[], None], after: Callable[[], None]) -> None:
        """Run ``work`` in a thread and wait for it.

        Args:
            work: Runs once, or never if the wait is cancelled before it starts, or the pool closed.
            after: Called once when ``work`` has ended or never will run, also if nobody waits any more.

        Raises:
            RuntimeError: Closed.
        """
        try:
            future = self._submit("write", work)
        except BaseException:
            after()
            raise
        self._writing.add(future)
        future.add_done_callback(self._writing.discard)
        future.add_done_callback(lambda _: after())
        await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let writes end for a few seconds, then drop what has not begun; idempotent."""
        with self._lock:
            self._closed = True
            pools, self._pools = (self._pools if self._process == os.getpid() else {}), {}
        if pools:
            wait(self._writing.copy(), timeout=_CLOSE_S)
        for pool in pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, use: str, work: Callable[[], T]) -> Future[T]:
        if self._process != os.getpid():  # forked: the parent's threads are not here, and its lock may be held
            self._lock, self._pools, self._writing, self._process = threading.Lock(), {}, set(), os.getpid()
        with self._lock:
            if self._closed:
                raise RuntimeError("the connector is closed")
            if use not in self._pools:
                self._pools[use] = ThreadPoolExecutor(self._workers, thread_name_prefix=f"kvstore-lmcache-{use}")
            return self._pools[use].submit(work)


def _discard(discard: Callable[[T], None], done: Future[T] | asyncio.Future[T]) -> None:
    if not done.cancelled() and done.exception() is None:
        discard(done.result())

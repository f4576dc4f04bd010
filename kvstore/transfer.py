"""Gets that run in the background: ``KVCache.submit_get``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from kvstore.errors import ClosedError, DeadlineError
from kvstore.types import BlockStatus

_WORKERS: Final = 4  # each spends its time in copies and reads that release the GIL; more than 4 do not help
_CLOSE_S: Final = 0.5  # for transfers to see that they are cancelled; L1 and the tiers are closed then

Work = Callable[[threading.Event], list[BlockStatus]]
"""Does a get and returns a status per block; stops early when the event is set."""


class Transfer:
    """A get under way; made by :meth:`KVCache.submit_get`.  Thread-safe.

    It borrows ``out``: until :meth:`poll` says True, nobody else may read, write or free that memory,
    whatever a timeout or a cancellation said.  A transfer that is dropped runs on and keeps ``out``
    alive.  In a forked child it has ended with ``ClosedError``.

    ``await transfer`` gives what :meth:`wait` returns; cancelling the awaiting task cancels the
    transfer too, which may go on for a moment: ask :meth:`poll` before using ``out``.
    """

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._future: Future[list[BlockStatus]] = Future()
        self._cancelling = threading.Event()
        self._pid = os.getpid()

    def poll(self) -> bool:
        """Whether it has ended: delivered, cancelled or failed; ``out`` is the caller's again then."""
        return self._future.done() or os.getpid() != self._pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Args:
            timeout: Seconds at most; None waits for as long as it takes.

        Returns:
            Blocks delivered: the leading ones, or with ``each`` those whose status is DELIVERED.

        Raises:
            DeadlineError: It has not ended yet and still borrows ``out``.
            ClosedError: The cache was closed meanwhile, or this is a forked child.
        """
        return sum(status is BlockStatus.DELIVERED for status in self._result(timeout))

    @property
    def statuses(self) -> list[BlockStatus]:
        """One status per block, after waiting for the end.

        Without ``each``, a block behind the delivered prefix is ABSENT whatever the reason.
        """
        return list(self._result(None))

    def cancel(self) -> bool:
        """Ask it to stop; what was delivered by then stays delivered and is counted.

        Returns:
            Whether it was still under way.  A transfer that had not begun has ended now; for another
            one wait until :meth:`poll` says so, at most the deadline of a get.
        """
        if self.poll():
            return False
        self._cancelling.set()
        self._future.cancel()
        return True

    def __await__(self) -> Generator[object, None, int]:
        return self._arrive().__await__()

    def __repr__(self) -> str:
        state = "ended" if self.poll() else "cancelling" if self._cancelling.is_set() else "under way"
        return f"<Transfer of {self._n_blocks} blocks, {state}>"

    # -- inner matters

    def run(self, work: Work) -> None:
        """Do the work in the calling thread, unless it was cancelled before."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(work(self._cancelling))
        except BaseException as e:  # noqa: BLE001 - border: handed to whoever waits for the transfer
            self._future.set_exception(e)

    def _result(self, timeout: float | None) -> list[BlockStatus]:
        if os.getpid() != self._pid:
            msg = "this transfer belongs to the parent of a forked process; submit it again here"
            raise ClosedError(msg)
        try:
            return self._future.result(timeout)
        except CancelledError:
            return [BlockStatus.ABSENT] * self._n_blocks
        except FutureTimeoutError as e:
            if self._future.done():  # a get never raises this, but what it runs in might
                raise
            msg = f"the transfer of {self._n_blocks} blocks has not ended after {timeout} s and still borrows its out"
            raise DeadlineError(msg) from e

    async def _arrive(self) -> int:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake(_: Future[list[BlockStatus]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.set)

        self._future.add_done_callback(wake)
        try:
            await arrived.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.wait(0)


class Transfers:
    """Runs transfers on a few daemon threads, started when they are needed; thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Transfer, Work] | None] = queue.SimpleQueue()
        self._under_way: set[Transfer] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, n_blocks: int, work: Work) -> Transfer:
        """Queue a get of ``n_blocks``."""
        transfer = Transfer(n_blocks)
        with self._lock:
            if self._closed:
                msg = "the cache is closed; open a cache again to submit a get"
                raise ClosedError(msg)
            self._under_way.add(transfer)
            if len(self._threads) < min(_WORKERS, len(self._under_way)):
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._waiting.put((transfer, work))
        return transfer

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            transfer, work = task
            transfer.run(work)
            with self._lock:
                self._under_way.discard(transfer)
            del task, transfer, work  # so that out is not kept while waiting

    def close(self) -> None:
        """Cancel what is under way and wait a moment for it; what takes longer ends when its tier does."""
        with self._lock:
            self._closed = True
            under_way = list(self._under_way)
        for transfer in under_way:
            transfer.cancel()
        for _ in self._threads:
            self._waiting.put(None)
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

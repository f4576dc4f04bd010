"""Daemon threads that wait on media, so that no caller has to wait longer than its deadline."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar, cast

from kvstore.errors import BackendTimeoutError, BackendUnavailableError
from kvstore.types import Call

T = TypeVar("T")

_STUCK_FACTOR: Final = 2  # stuck threads are replaced until the pool is twice its size


class Job(Generic[T]):
    """One operation handed to a worker; the caller may stop waiting, the job always ends by itself."""

    __slots__ = (
        *("_finished", "_fn", "_late", "_lock", "abandoned", "ended", "error", "patience_s", "result"),
        *("started", "started_at"),
    )

    def __init__(
        self, fn: Callable[[], T], late: Callable[[], None] | None = None, *, patience_s: float | None = None
    ) -> None:
        self._fn = fn
        self._late = late
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self.abandoned = False
        self.patience_s = patience_s
        """For jobs that nobody waits for: seconds after which the thread counts as stuck."""
        self.started = False
        self.started_at = 0.0
        self.ended = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Execute in a worker thread.

        Whatever the operation raises is kept for the waiting caller; nothing may kill the thread.
        """
        if not self.abandoned:
            self.started_at = time.monotonic()
            self.started = True
            try:
                self.result = self._fn()
            except BaseException as e:  # noqa: BLE001 - border: handed to the caller, or dropped with the late result
                self.error = e
        with self._lock:
            self._finished.set()
            abandoned = self.abandoned
        if abandoned:
            if self._late is not None:
                self._late()
            self.error = None  # nobody will ask, and its frames hold this job

    def outcome(self) -> T:
        """Return the result of an ended job or raise its error; the job lets go of the error.

        An exception that its own frames hold keeps their memory and connections until the garbage collector comes.
        """
        error, self.error = self.error, None
        if error is None:
            return cast("T", self.result)  # set whenever there is no error
        try:
            raise error
        finally:
            del error

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False means the job is abandoned and ``late`` will run at its end."""
        if self._finished.wait(timeout_s):
            return True
        with self._lock:
            if self._finished.is_set():
                return True
            self.abandoned = True
            return False


class WorkerPool:
    """A few daemon threads with one queue; started on first use, replaced when stuck.

    ``concurrent.futures`` is not used because its exit hook joins hung threads.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._stuck: set[Job[Any]] = set()
        self._unwatched: set[Job[Any]] = set()  # not ended, and nobody waits for them
        self._closed = False

    @property
    def size(self) -> int:
        """Threads in normal operation."""
        return self._size

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return self._jobs.qsize()

    def run(self, fn: Callable[[], T], call: Call) -> T:
        """Run ``fn`` in a worker and wait until the call's deadline.

        Raises:
            BackendTimeoutError: It did not end in time; it goes on by itself.
            BackendUnavailableError: Every thread is stuck.
        """
        job: Job[T] = Job(fn)
        self.submit(job)
        return self.collect(job, call)

    def collect(self, job: Job[T], call: Call) -> T:
        """Wait for a submitted job and return its result or raise its error."""
        if not job.wait(call.remaining()):
            self._note_stuck(job)
            call.cancel()
            msg = f"{self._name}: no answer within the deadline"
            raise BackendTimeoutError(msg)
        return job.outcome()

    def submit(self, job: Job[Any]) -> None:
        """Queue a job, starting threads as needed.

        Raises:
            BackendUnavailableError: Every thread is stuck, or the pool is closed.
        """
        with self._lock:
            if self._closed:
                msg = f"{self._name} is closed"
                raise BackendUnavailableError(msg)
            self._find_stuck()
            if len(self._stuck) >= _STUCK_FACTOR * self._size:
                msg = f"{self._name}: all {len(self._stuck)} threads wait for operations that do not end"
                raise BackendUnavailableError(msg)
            if len(self._threads) - len(self._stuck) < self._size:
                self._start_thread()
            if job.patience_s is not None:
                self._unwatched.add(job)
        self._jobs.put(job)

    def leave(self, job: Job[Any], patience_s: float) -> bool:
        """Stop caring about a job; returns whether it has ended.

        If it has not, its ``late`` runs at its end, and its thread counts as stuck after a while.
        """
        if job.wait(0):
            return True
        with self._lock:
            if not job.ended:
                job.patience_s = patience_s
                self._unwatched.add(job)
        return False

    def _find_stuck(self) -> None:
        now = time.monotonic()
        for job in self._unwatched:
            if job.started and job.patience_s is not None and now - job.started_at > job.patience_s:
                self._stuck.add(job)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _note_stuck(self, job: Job[Any]) -> None:
        with self._lock:
            if job.started and not job.ended:
                self._stuck.add(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            with self._lock:
                job.ended = True
                self._stuck.discard(job)
                self._unwatched.discard(job)
                if len(self._threads) - len(self._stuck) > self._size:  # this one was replaced meanwhile
                    break
        with self._lock:
            self._threads.discard(threading.current_thread())

    def close(self, timeout_s: float = 0.5, *, drop: bool = False) -> None:
        """End the threads; those that are stuck are daemons and end with the process.

        Args:
            timeout_s: How long to wait for them.
            drop: Forget the jobs that no thread has taken yet; nobody may be waiting for them.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        while drop and self._jobs.qsize():
            with contextlib.suppress(queue.Empty):
                self._jobs.get_nowait()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def strided(n: int, shares: int) -> Sequence[range]:
    """Deal ``n`` indices to at most ``shares`` workers, so that each gets early and late ones."""
    return [range(k, n, shares) for k in range(min(shares, n))]

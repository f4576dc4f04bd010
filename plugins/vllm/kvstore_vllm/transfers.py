"""Transfers between vLLM's CPU cache and the store, on threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import DeadlineError
from kvstore.types import BlockStatus
from kvstore_vllm.offload_keys import OffloadKeys
from kvstore_vllm.rows import PrimaryRows

if TYPE_CHECKING:
    import torch

    from kvstore import KVCache

logger = logging.getLogger("kvstore.vllm")

# One read call moves at most so much, so that its deadline holds for a bounded amount of work: half a
# second at 500 MB/s.
_CALL_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """One job of vLLM's, as submitted.

    Attributes:
        job_id: vLLM's number.
        keys: Offload keys, in the order of the slots.
        chunk_ids: Slots of the CPU cache.
        is_load: From the store into the slots, or the other way.
        context: vLLM's request context.
    """

    job_id: int
    keys: Sequence[bytes]
    chunk_ids: Sequence[int]
    is_load: bool
    context: Any = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a transfer.

    Attributes:
        transfer: The job.
        done: Keys that were transferred, or need not be.
        seconds: Time it took, waiting not included.
        moved_blocks: Blocks copied.
    """

    transfer: Transfer
    done: frozenset[bytes]
    seconds: float
    moved_blocks: int

    @property
    def failed(self) -> list[bytes]:
        """Keys that were not transferred."""
        return [key for key in self.transfer.keys if key not in self.done]


class Transfers:
    """Runs jobs off the scheduler's thread and keeps what became of them until it is asked for.

    Thread-safe.  A job ends in one :class:`Outcome`, whatever a medium does: every call into the store
    is bounded by its deadline.

    Args:
        cache: The store.
        rows: vLLM's CPU cache.
        keys: Makes kvstore keys.
        workers: Threads for loads; stores have half as many of their own, so that loads go first.
        room_s: Seconds that a store waits for room in the write queues; vLLM's back-pressure detector
            sees the time and stores less.
        on_accepted: Told the keys of blocks that are on their way to the tiers.
    """

    def __init__(  # noqa: PLR0913 - what it works with, and three settings
        self,
        cache: KVCache,
        rows: PrimaryRows,
        keys: OffloadKeys,
        *,
        workers: int,
        room_s: float,
        on_accepted: Callable[[list[bytes]], None],
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._keys = keys
        self._room_s = room_s
        self._on_accepted = on_accepted
        self._loads = ThreadPoolExecutor(workers, thread_name_prefix="kvstore-vllm-load")
        self._stores = ThreadPoolExecutor(max(1, workers // 2), thread_name_prefix="kvstore-vllm-store")
        self._lock = threading.Condition()
        self._under_way = 0
        self._outcomes: deque[Outcome] = deque()
        self._blocks: Counter[tuple[str, str]] = Counter()
        self._logged = False

    def submit(self, transfer: Transfer, skip: frozenset[bytes] = frozenset()) -> None:
        """Start a job; returns at once.

        Args:
            transfer: The job.
            skip: Keys that are known to be stored.
        """
        with self._lock:
            self._under_way += 1
        pool = self._loads if transfer.is_load else self._stores
        try:
            future = pool.submit(self._run, transfer, skip)
        except RuntimeError:  # shut down
            self._end(Outcome(transfer, frozenset(), 0.0, 0))
            return
        future.add_done_callback(lambda future: self._cancelled(future, transfer))

    def take(self) -> list[Outcome]:
        """The outcomes since the last call."""
        outcomes: list[Outcome] = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    @property
    def pending(self) -> bool:
        """Whether a job runs, or has an outcome that nobody has taken."""
        return bool(self._under_way or self._outcomes)

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Blocks by ``("load" or "store", what became of them)`` since the last call."""
        with self._lock:
            counts, self._blocks = self._blocks, Counter()
        return counts

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no job runs; their outcomes are kept.

        Args:
            timeout_s: Seconds to wait at most; None waits as long as it takes.

        Returns:
            False when jobs still ran at the end.
        """
        with self._lock:
            return self._lock.wait_for(lambda: not self._under_way, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun and wait for the rest; idempotent.

        Returns:
            False when a job still ran after ``timeout_s``: it may still write into vLLM's memory.
        """
        for pool in (self._loads, self._stores):
            pool.shutdown(wait=False, cancel_futures=True)
        return self.wait(timeout_s)

    # -- threads of the pools

    def _run(self, transfer: Transfer, skip: frozenset[bytes]) -> None:
        started = time.monotonic()
        done: set[bytes] = set(skip)
        move: Callable[[Transfer, set[bytes]], int] = self._load if transfer.is_load else self._store
        moved = 0
        try:
            moved = move(transfer, done)
        except Exception as e:  # noqa: BLE001 - the border to vLLM: without an outcome a request waits forever
            self._note_error(transfer, e)
        self._end(Outcome(transfer, frozenset(done), time.monotonic() - started, moved))

    def _load(self, transfer: Transfer, done: set[bytes]) -> int:
        moved = 0
        per_call = max(1, _CALL_BYTES // self._rows.row_bytes)
        for run in self._keys.runs(transfer.keys, transfer.context):
            for first in range(0, len(run.indices), per_call):
                indices = run.indices[first : first + per_call]
                rows = self._rows.at(transfer.chunk_ids[i] for i in indices)
                statuses = self._cache.get_each(run.key.suffix(first).prefix(len(indices)), rows)
                self._count("load", [status.value for status in statuses])
                good = [i for i, status in zip(indices, statuses, strict=True) if status is BlockStatus.DELIVERED]
                moved += len(good)
                done.update(transfer.keys[i] for i in good)
                if not good and any(s in (BlockStatus.TIMEOUT, BlockStatus.UNAVAILABLE) for s in statuses):
                    return moved  # the medium is not well: the rest would only take as long again
        return moved

    def _store(self, transfer: Transfer, done: set[bytes]) -> int:
        self._count("store", ["known"] * len(done))
        wanted = [i for i, key in enumerate(transfer.keys) if key not in done]
        moved = 0
        for run in self._keys.runs([transfer.keys[i] for i in wanted], transfer.context):
            indices = [wanted[i] for i in run.indices]
            rows = self._rows.at(transfer.chunk_ids[i] for i in indices)
            accepted = self._put(run.key, rows)
            self._count("store", ["accepted"] * accepted + ["refused"] * (len(rows) - accepted))
            moved += accepted
            stored = [transfer.keys[i] for i in indices[:accepted]]
            done.update(stored)
            self._on_accepted(stored)
        return moved

    def _put(self, key: Any, rows: Sequence[torch.Tensor]) -> int:
        """Put blocks; what finds the write queues full waits once for room."""
        accepted = self._cache.put(key, rows)
        if accepted == len(rows):
            return accepted
        try:
            self._cache.flush(self._room_s)
        except DeadlineError:
            return accepted
        return accepted + self._cache.put(key.suffix(accepted), rows[accepted:])

    def _count(self, what: str, results: Sequence[str]) -> None:
        with self._lock:
            self._blocks.update((what, result) for result in results)

    def _note_error(self, transfer: Transfer, error: Exception) -> None:
        self._count("load" if transfer.is_load else "store", ["error"] * len(transfer.keys))
        if not self._logged:
            self._logged = True
            what = "load" if transfer.is_load else "store"
            logger.error(
                "a %s of %d blocks failed; further errors are only counted", what, len(transfer.keys), exc_info=error
            )

    def _cancelled(self, future: Future[None], transfer: Transfer) -> None:
        if future.cancelled():
            self._end(Outcome(transfer, frozenset(), 0.0, 0))

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes.append(outcome)
            self._under_way -= 1
            self._lock.notify_all()

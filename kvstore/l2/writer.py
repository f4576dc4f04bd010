"""The write-behind queue of one tier: bounded in bytes, batched, never in the caller's way."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.backend import Capability, PutHint, PutItem
from kvstore.l2.codec_choice import CodecChoice
from kvstore.record import RecordMeta
from kvstore.types import WRITE_PRIORITY, Call, Presence, PutStatus

if TYPE_CHECKING:
    from kvstore.blocks import EncodedRecord
    from kvstore.l2.shelf import CodecShelf
    from kvstore.l2.tier import Tier

logger = logging.getLogger("kvstore.writer")

_BATCH_BLOCKS: Final = 32  # one transaction of small blocks; more only adds latency
_BATCH_BYTES: Final = 8 << 20  # large blocks gain nothing from batching
_OK: Final = frozenset({PutStatus.STORED, PutStatus.EXISTS})


@dataclass(slots=True)
class Write:
    """One block on its way to a tier.

    Attributes:
        meta: Identity that goes into the record.
        name: Stored name in the epoch of the put, so that a later ``clear`` leaves it unreachable.
        hint: Position for the backend.
        raw: The block's bytes; owned by L1 (pinned) or by this object, unchanged until ``done``.
        frame: ``raw`` with writable bytes in front of it that belong to this write alone, so that a
            raw record becomes one contiguous buffer; None when there are none.
        done: Called once with whether the tier now holds the block; it releases ``raw``.
    """

    meta: RecordMeta
    name: bytes
    hint: PutHint
    raw: memoryview
    done: Callable[[bool], None]
    frame: memoryview | None = None
    seq: int = 0
    released: bool = False

    def release(self, *, stored: bool) -> None:
        """Call ``done`` unless that has happened."""
        if not self.released:
            self.released = True
            self.done(stored)


class Writer:
    """Moves blocks into a tier from its own daemon threads; thread-safe.

    A full queue refuses the rest of a put instead of dropping heads: a missing head makes every
    later block of its chain unreachable.
    """

    def __init__(self, tier: Tier, shelf: CodecShelf, *, on_stored: Callable[[Sequence[bytes]], None]) -> None:
        self._tier = tier
        self._shelf = shelf
        self._on_stored = on_stored
        self._choice = CodecChoice(tier)
        self._limit_bytes = tier.settings.queue_bytes
        self._cond = threading.Condition()
        self._queue: deque[Write] = deque()
        self._queued_bytes = 0
        self._in_flight: dict[int, set[bytes]] = {}  # worker -> digests of its batch
        self._accepted = 0  # sequence number of the newest queued write
        self._outstanding: dict[int, None] = {}  # sequence numbers not settled yet, oldest first
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def queued_bytes(self) -> int:
        """Raw bytes waiting or being written."""
        return self._queued_bytes

    def enqueue(self, writes: Sequence[Write]) -> int:
        """Queue writes in order until the byte bound; returns how many were taken.

        The rest is refused and counted; their ``done`` is not called.
        """
        taken = 0
        with self._cond:
            if not self._closing:
                for write in writes:
                    if self._queued_bytes + write.raw.nbytes > self._limit_bytes:
                        break
                    self._accepted += 1
                    write.seq = self._accepted
                    self._outstanding[write.seq] = None
                    self._queue.append(write)
                    self._queued_bytes += write.raw.nbytes
                    taken += 1
                if taken:
                    self._start_threads()
                    self._cond.notify()
        if taken < len(writes):
            self._tier.counters.add(refused_queue_full=len(writes) - taken)
        return taken

    def take_back(self, blocks: int) -> int:
        """Give up the newest queued writes to free what they pin; returns how many."""
        with self._cond:
            victims = [self._queue.pop() for _ in range(min(blocks, len(self._queue)))]
        self._abandon(victims)
        return len(victims)

    def cancel(self, digests: frozenset[bytes] | None, timeout_s: float) -> None:
        """Drop queued writes of some digests (None: all) and wait for those in flight."""
        with self._cond:
            dropped = [w for w in self._queue if digests is None or w.meta.digest in digests]
            kept = [] if digests is None else [w for w in self._queue if w.meta.digest not in digests]
            self._queue = deque(kept)
        self._abandon(dropped)
        with self._cond:
            self._cond.wait_for(lambda: not self._busy_with(digests), timeout_s)

    def _busy_with(self, digests: frozenset[bytes] | None) -> bool:
        batches = self._in_flight.values()
        return any(batch if digests is None else batch & digests for batch in batches)

    def _abandon(self, writes: Sequence[Write]) -> None:
        if not writes:
            return
        self._tier.counters.add(stores_dropped=len(writes))
        for write in writes:
            write.release(stored=False)
        self._settle(writes)

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until every write accepted before the call is settled; False on timeout."""
        with self._cond:
            newest = self._accepted
            return self._cond.wait_for(lambda: next(iter(self._outstanding), newest + 1) > newest, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is queued within the time, drop and count the rest, end the threads."""
        deadline = time.monotonic() + timeout_s
        with self._cond:
            self._closing = True
            self._cond.notify_all()
        self.flush(timeout_s)
        self.cancel(None, max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- worker threads

    def _start_threads(self) -> None:
        if self._threads:
            return
        for number in range(self._tier.settings.plugin.max_writers):
            name = f"kvstore-{self._tier.name}-writer-{number}"
            thread = threading.Thread(target=self._work, args=(number,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, number: int) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._queue or self._closing)
                batch = self._next_batch()
                if not batch:
                    return
                self._in_flight[number] = {w.meta.digest for w in batch}
            try:
                self._write(batch)
            except Exception:  # border: the thread must survive whatever one batch does
                logger.exception("tier %r: a batch of %d blocks was lost", self._tier.name, len(batch))
                self._finish(batch, [PutStatus.UNAVAILABLE] * len(batch))
            finally:
                with self._cond:
                    self._in_flight[number] = set()
                self._settle(batch)

    def _next_batch(self) -> list[Write]:
        batch: list[Write] = []
        nbytes = 0
        while self._queue and len(batch) < _BATCH_BLOCKS and nbytes < _BATCH_BYTES:
            write = self._queue.popleft()
            batch.append(write)
            nbytes += write.raw.nbytes
        return batch

    def _settle(self, writes: Sequence[Write]) -> None:
        with self._cond:
            for write in writes:
                self._outstanding.pop(write.seq, None)
            self._queued_bytes -= sum(w.raw.nbytes for w in writes)
            self._cond.notify_all()

    def _write(self, batch: list[Write]) -> None:
        call = Call.within(self._tier.settings.deadline_s, priority=WRITE_PRIORITY)
        present = self._already_stored(batch, call)
        todo = [w for w, there in zip(batch, present, strict=True) if not there]
        self._finish([w for w, there in zip(batch, present, strict=True) if there], None)
        if todo:
            self._finish(todo, self._store(todo, call))

    def _already_stored(self, batch: list[Write], call: Call) -> list[bool]:
        """A cheap look that saves encoding; media that refuse duplicates themselves are not asked."""
        if Capability.CONDITIONAL_PUT in self._tier.backend.capabilities:
            return [False] * len(batch)
        names = [w.name for w in batch]
        found = self._tier.guarded("exists_many", lambda: self._tier.backend.exists_many(names, call))
        if found is None or len(found) != len(batch):
            return [False] * len(batch)
        present = [p is Presence.PRESENT for p in found]
        stored = [name for name, there in zip(names, present, strict=True) if there]
        if stored:
            tail_first = stored[::-1]
            self._tier.guarded("touch_many", lambda: self._tier.backend.touch_many(tail_first))
        return present

    def _store(self, todo: list[Write], call: Call) -> list[PutStatus]:
        encoder = self._shelf.encoder(self._choice.name())
        try:
            records = [encoder.encode(w.raw, w.meta) for w in todo]
            # tail first: later items of a call are the more valuable ones on a medium that evicts
            items = [_item(w, r) for w, r in zip(todo, records, strict=True)][::-1]
            statuses = self._tier.put(items, call)[::-1]
            self._count(todo, records, statuses)
        finally:
            encoder.recycle()
        return statuses

    def _count(self, todo: list[Write], records: list[EncodedRecord], statuses: list[PutStatus]) -> None:
        stored = [(w, r) for w, r, s in zip(todo, records, statuses, strict=True) if s is PutStatus.STORED]
        self._tier.counters.add(
            stored=len(stored),
            stored_raw_bytes=sum(w.raw.nbytes for w, _ in stored),
            stored_bytes=sum(r.nbytes for _, r in stored),
            already_stored=sum(s is PutStatus.EXISTS for s in statuses),
            refused_medium=sum(s not in _OK for s in statuses),
        )
        if stored:
            self._on_stored([w.meta.digest for w, _ in stored])

    def _finish(self, writes: Sequence[Write], statuses: Sequence[PutStatus] | None) -> None:
        """Release each block; no statuses means all of them were there already."""
        if statuses is None:
            self._tier.counters.add(already_stored=len(writes))
            statuses = [PutStatus.EXISTS] * len(writes)
        for write, status in zip(writes, statuses, strict=True):
            write.release(stored=status in _OK)


def _item(write: Write, record: EncodedRecord) -> PutItem:
    """What the backend gets: one buffer where that is possible, which media that gather by copying like."""
    head = record.buffers[0]
    frame = write.frame
    room = 0 if frame is None else frame.nbytes - write.raw.nbytes
    if frame is None or len(record.buffers) != 2 or not record.stored_raw or len(head) > room:
        return PutItem(write.name, record.buffers, write.hint)
    frame[room - len(head) : room] = head
    return PutItem(write.name, [frame[room - len(head) :]], write.hint, head_bytes=len(head))

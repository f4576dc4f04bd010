"""The write-behind queue of one tier: bounded in bytes, batched, never in the caller's way."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.backend import BatchShape, Capability, PutItem
from kvstore.errors import PluginError
from kvstore.history import Event
from kvstore.l2.codec_choice import CodecChoice
from kvstore.l2.write_queue import Request, Write, WriteQueue
from kvstore.types import WRITE_PRIORITY, Call, Presence, PutStatus

if TYPE_CHECKING:
    from kvstore.blocks import EncodedRecord
    from kvstore.l2.gauge import Gauge
    from kvstore.l2.shelf import CodecShelf
    from kvstore.l2.tier import Tier

logger = logging.getLogger("kvstore.writer")

_OK: Final = frozenset({PutStatus.STORED, PutStatus.EXISTS})
_EVERYTHING: Final = sys.maxsize


class Writer:
    """Moves blocks into a tier from its own daemon threads; thread-safe.

    A full queue refuses the rest of a put instead of dropping heads: a missing head makes every
    later block of its chain unreachable.

    Args:
        tier: Where to.
        shelf: Makes encoders.
        gauge: The tier's space.
        on_stored: Told the digests of newly stored blocks.

    Raises:
        PluginError: The backend cannot say how it likes its batches.
    """

    def __init__(
        self, tier: Tier, shelf: CodecShelf, gauge: Gauge, *, on_stored: Callable[[Sequence[bytes]], None]
    ) -> None:
        self._tier = tier
        self._shelf = shelf
        self._on_stored = on_stored
        self._choice = CodecChoice(tier, gauge)
        self._limit_bytes = tier.settings.queue_bytes
        self._lock = threading.Lock()
        self._work_comes = threading.Condition(self._lock)
        self._work_ends = threading.Condition(self._lock)
        self._queue = WriteQueue(_batch_shape_of(tier))
        self._queued_bytes = 0
        self._in_flight: dict[int, set[bytes]] = {}  # worker -> digests of its batch
        self._batches = 0
        self._accepted = 0  # sequence number of the newest queued write
        self._urgent = 0  # writes up to this one are not held back
        self._outstanding: dict[int, None] = {}  # sequence numbers not settled yet, oldest first
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def queued_bytes(self) -> int:
        """Raw bytes waiting or being written."""
        return self._queued_bytes

    @property
    def room_bytes(self) -> int:
        """Raw bytes that the queue would take now."""
        return 0 if self._closing else max(0, self._limit_bytes - self._queued_bytes)

    def waiting(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these blocks are queued or being written; looks through the whole queue."""
        with self._lock:
            coming = {write.meta.digest for write in self._queue}.union(*self._in_flight.values())
        return coming.intersection(digests)

    def enqueue(self, writes: Sequence[Write]) -> int:
        """Queue writes in order until the byte bound; returns how many were taken.

        The rest is refused and counted; their ``done`` is not called.
        """
        taken = 0
        with self._lock:
            if not self._closing:
                for write in writes:
                    if self._queued_bytes + write.raw.nbytes > self._limit_bytes:
                        break
                    self._add(write)
                    taken += 1
                if taken:
                    self._start_threads()
                    self._work_comes.notify()
        if taken < len(writes):
            self._tier.counters.add(refused_queue_full=len(writes) - taken)
            self._note(writes[taken:], Event.QUEUE_FULL)
        return taken

    def _add(self, write: Write) -> None:
        self._accepted += 1
        write.seq = self._accepted
        self._outstanding[write.seq] = None
        if write.request is not None:
            write.request.pending += 1
        self._queue.append(write)
        self._queued_bytes += write.raw.nbytes

    def end(self, request: Request) -> None:
        """No more writes of a request will follow; its blocks are touched once all are settled."""
        with self._lock:
            request.ended = True
            over = not request.pending
        if over:
            self._tier.touch(request.kind, request.used())

    def take_back(self, blocks: int) -> int:
        """Give up the newest queued writes to free what they pin; returns how many."""
        with self._lock:
            victims = self._queue.take_newest(blocks)
        self._abandon(victims, Event.DROPPED)
        return len(victims)

    def cancel(self, digests: frozenset[bytes] | None, timeout_s: float) -> None:
        """Drop queued writes of some digests (None: all) and wait for those in flight."""
        with self._lock:
            dropped = self._queue.remove(digests)
        self._abandon(dropped, Event.CLEARED if digests is None else Event.DELETED)
        with self._lock:
            self._work_ends.wait_for(lambda: not self._busy_with(digests), timeout_s)

    def _busy_with(self, digests: frozenset[bytes] | None) -> bool:
        batches = self._in_flight.values()
        return any(batch if digests is None else batch & digests for batch in batches)

    def _abandon(self, writes: Sequence[Write], event: Event) -> None:
        if not writes:
            return
        self._tier.counters.add(stores_dropped=len(writes))
        self._note(writes, event)
        for write in writes:
            write.release(stored=False)
        self._settle(writes)

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until every write accepted before the call is settled; False on timeout."""
        with self._lock:
            newest = self._hurry()
            return self._work_ends.wait_for(lambda: next(iter(self._outstanding), newest + 1) > newest, timeout_s)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something holds that the end of writes brings about; False on timeout.

        ``holds`` runs under the writer's lock.  What is queued by now is not held back.
        """
        with self._lock:
            self._hurry()
            return self._work_ends.wait_for(holds, timeout_s)

    def _hurry(self) -> int:
        """Hold nothing back that is queued by now."""
        self._urgent = self._accepted
        self._work_comes.notify_all()
        return self._urgent

    def close(self, timeout_s: float) -> None:
        """Write what is queued within the time, drop and count the rest, end the threads."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
            self._work_comes.notify_all()
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
        while batch := self._next_batch(number):
            try:
                self._write(batch)
            except Exception:  # border: the thread must survive whatever one batch does
                logger.exception("tier %r: a batch of %d blocks was lost", self._tier.name, len(batch))
                self._finish(batch, [PutStatus.UNAVAILABLE] * len(batch))
                self._note(batch, Event.REFUSED, "a bug, see the log")
            finally:
                with self._lock:
                    self._in_flight[number] = set()
                self._settle(batch)

    def _next_batch(self, number: int) -> list[Write]:
        """Wait for the oldest writes that are ready; empty when the writer closes."""
        with self._lock:
            while not (batch := self._queue.next_batch(_EVERYTHING if self._closing else self._urgent)):
                if self._closing:
                    return batch
                self._work_comes.wait(self._queue.ready_in(self._urgent))
            self._in_flight[number] = {w.meta.digest for w in batch}
            self._batches += 1
            for request in {w.request for w in batch if w.request is not None}:
                request.split = request.split or request.batch >= 0
                request.batch = self._batches
            if self._queue:  # another thread may take the next one
                self._work_comes.notify()
        return batch

    def _settle(self, writes: Sequence[Write]) -> None:
        over: list[Request] = []
        with self._lock:
            for write in writes:
                self._outstanding.pop(write.seq, None)
                request = write.request
                if request is not None:
                    request.pending -= 1
                    if request.ended and not request.pending:
                        over.append(request)
            self._queued_bytes -= sum(w.raw.nbytes for w in writes)
            if not over:
                self._work_ends.notify_all()
                return
        # before anybody is told the end: whoever flushed may rely on the order
        for request in over:
            self._tier.touch(request.kind, request.used())
        with self._lock:
            self._work_ends.notify_all()

    def _write(self, batch: list[Write]) -> None:
        call = Call.within(self._tier.settings.deadline_s, priority=WRITE_PRIORITY)
        present = self._already_stored(batch, call)
        todo = [w for w, there in zip(batch, present, strict=True) if not there]
        known = [w for w, there in zip(batch, present, strict=True) if there]
        self._touch(known)  # before the new ones, which shall evict others
        self._finish(known, None)
        if todo:
            self._finish(todo, self._store(todo, call))
            self._touch(known)  # and after them: what was there already is mostly the head

    def _touch(self, writes: Sequence[Write]) -> None:
        if writes:
            tail_first = [w.name for w in writes[::-1]]
            self._tier.guarded("touch_many", lambda: self._tier.backend.touch_many(tail_first))

    def _already_stored(self, batch: list[Write], call: Call) -> list[bool]:
        """A cheap look that saves encoding; media that refuse duplicates themselves are not asked."""
        if Capability.CONDITIONAL_PUT in self._tier.backend.capabilities:
            return [False] * len(batch)
        names = [w.name for w in batch]
        found = self._tier.guarded("exists_many", lambda: self._tier.backend.exists_many(names, call))
        if found is None or len(found) != len(batch):
            return [False] * len(batch)
        return [p is Presence.PRESENT for p in found]

    def _store(self, todo: list[Write], call: Call) -> list[PutStatus]:
        encoder = self._shelf.encoder(self._choice.name())
        try:
            records = [encoder.encode(w.raw, w.meta) for w in todo]
            # tail first: later items of a call are the more valuable ones on a medium that evicts
            items = [_item(w, r) for w, r in zip(todo, records, strict=True)][::-1]
            # before the put, which may evict some of these again
            self._tier.note_names([w.name for w in todo], Event.STORED)
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
            repaired=sum(w.repair for w, _ in stored),
        )
        if stored:
            self._on_stored([w.meta.digest for w, _ in stored])
        for status in {s for s in statuses if s not in _OK}:
            self._note([w for w, s in zip(todo, statuses, strict=True) if s is status], Event.REFUSED, status.value)

    def _note(self, writes: Sequence[Write], event: Event, detail: str = "") -> None:
        self._tier.history.note([write.meta.digest for write in writes], event, detail)

    def _finish(self, writes: Sequence[Write], statuses: Sequence[PutStatus] | None) -> None:
        """Release each block; no statuses means all of them were there already."""
        if statuses is None:
            if writes:
                self._tier.counters.add(already_stored=len(writes))
                self._tier.note_names([write.name for write in writes], Event.STORED)
            statuses = [PutStatus.EXISTS] * len(writes)
        for write, status in zip(writes, statuses, strict=True):
            write.release(stored=status in _OK)


def _batch_shape_of(tier: Tier) -> BatchShape:
    """Ask a backend how it likes its batches.

    Raises:
        PluginError: It raised, or its answer makes no sense.
    """
    plugin = tier.settings.plugin.name
    expected = "expected a BatchShape with blocks and nbytes of at least 1 and align from 1 to blocks"
    try:
        shape: object = tier.backend.batch_shape()
    except Exception as e:  # border: a plugin's bug
        msg = f"tier {tier.name!r}: batch_shape of backend {plugin!r} raised {e!r}; {expected}"
        raise PluginError(msg) from e
    if isinstance(shape, BatchShape):
        numbers = (shape.blocks, shape.nbytes, shape.align)
        if all(type(n) is int and n >= 1 for n in numbers) and shape.align <= shape.blocks:
            return shape
    msg = f"tier {tier.name!r}: batch_shape of backend {plugin!r} answered {shape!r:.120}; {expected}"
    raise PluginError(msg)


def _item(write: Write, record: EncodedRecord) -> PutItem:
    """What the backend gets: one buffer where that is possible, which media that gather by copying like."""
    head = record.buffers[0]
    frame = write.frame
    room = 0 if frame is None else frame.nbytes - write.raw.nbytes
    if frame is None or len(record.buffers) != 2 or not record.stored_raw or len(head) > room:
        return PutItem(write.name, record.buffers, write.hint)
    frame[room - len(head) : room] = head
    return PutItem(write.name, [frame[room - len(head) :]], write.hint, head_bytes=len(head))

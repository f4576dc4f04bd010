"""Blocks waiting to be written, in the order of their puts, grouped as the medium likes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backend import BatchShape, PutHint
from kvstore.record import RecordMeta

HOLD_S: Final = 0.05
"""How long a run that may still grow is held back: a put of the next block joins it, and no reader
of another process waits noticeably longer for it."""


@dataclass(slots=True, eq=False)
class Request:
    """The writes of one put; at their end the put's head must be the youngest.

    Written in several batches, the tail would come out younger than the head, and a medium that
    evicts by age would behead the prefix.  The writer touches the blocks once more then.

    Attributes:
        kind: Kind of the key.
        digests: Its blocks that the tier holds or is about to get, in key order; set by whoever
            ends the request.
        known: How many of them, counted from the head, to touch even if one batch took the rest:
            those up to the last one that the tier held before.
        pending: Writes that are not settled.
        batch: Number of the batch that took the first write.
        split: Whether other batches took more of them.
        ended: No more writes will follow.
    """

    kind: int
    digests: Sequence[bytes] = ()
    known: int = 0
    pending: int = 0
    batch: int = -1
    split: bool = False
    ended: bool = False

    def used(self) -> Sequence[bytes]:
        """Blocks to touch, in key order."""
        return self.digests if self.split else self.digests[: self.known]


@dataclass(slots=True, eq=False)
class Write:
    """One block on its way to a tier.

    Attributes:
        meta: Identity that goes into the record.
        name: Stored name in the epoch of the put, so that a later ``clear`` leaves it unreachable.
        hint: Position for the backend.
        raw: The block's bytes; owned by L1 (pinned) or by this object, unchanged until ``done``.
        done: Called once with whether the tier now holds the block; it releases ``raw``.
        frame: ``raw`` with writable bytes in front of it that belong to this write alone, so that a
            raw record becomes one contiguous buffer; None when there are none.
        repair: The tier's own copy was damaged.
        request: The put that it belongs to; None when it stands alone.
    """

    meta: RecordMeta
    name: bytes
    hint: PutHint
    raw: memoryview
    done: Callable[[bool], None]
    frame: memoryview | None = None
    repair: bool = False
    request: Request | None = None
    seq: int = 0
    released: bool = False

    def release(self, *, stored: bool) -> None:
        """Call ``done`` unless that has happened."""
        if not self.released:
            self.released = True
            self.done(stored)


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive blocks that a batch takes together."""

    born: float
    writes: list[Write]
    full: bool = False


class WriteQueue:
    """Runs of writes, first in, first out.  Not thread-safe: the writer holds its lock around it.

    A medium with ``align`` above 1 packs consecutive blocks, so they are gathered into runs that
    end where a block's position + 1 is a multiple of ``align``, also when the blocks of several
    sequences arrive in turns.  A run that may still grow is held back for :data:`HOLD_S` at most.

    Args:
        shape: How the medium likes its batches.
        clock: Seconds, monotonic.
    """

    def __init__(self, shape: BatchShape, clock: Callable[[], float] = time.monotonic) -> None:
        self._shape = shape
        self._clock = clock
        self._runs: deque[_Run] = deque()
        self._growing: dict[bytes, _Run] = {}  # name of a run's last block -> the run, if it may grow
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def append(self, write: Write) -> None:
        """Add a write behind all others, or to the run that it continues."""
        self._blocks += 1
        align, position = self._shape.align, write.hint.position
        if align == 1 or position < 0:
            self._runs.append(_Run(0.0, [write], full=True))
            return
        run = self._growing.pop(write.hint.parent, None) if position % align else None
        if run is None:
            run = _Run(self._clock(), [])
            self._runs.append(run)
        run.writes.append(write)
        run.full = (position + 1) % align == 0
        if not run.full:
            self._growing[write.name] = run

    def next_batch(self, urgent: int) -> list[Write]:
        """Take the oldest writes, up to what the medium likes at once; empty when none is ready.

        Args:
            urgent: Writes up to this sequence number are not held back.
        """
        batch: list[Write] = []
        nbytes = 0
        held: list[_Run] = []
        now = self._clock()
        while self._runs and nbytes < self._shape.nbytes:
            run = self._runs[0]
            if batch and len(batch) + len(run.writes) > self._shape.blocks:
                break
            self._runs.popleft()
            if not self._ready(run, urgent, now):
                held.append(run)
                continue
            self._take(run)
            batch += run.writes
            nbytes += sum(write.raw.nbytes for write in run.writes)
        self._runs.extendleft(reversed(held))
        return batch

    def ready_in(self, urgent: int) -> float | None:
        """Seconds until the next batch is ready, None when nothing waits."""
        now = self._clock()
        waits = (0.0 if self._ready(run, urgent, now) else run.born + HOLD_S - now for run in self._runs)
        return min(waits, default=None)

    def take_newest(self, blocks: int) -> list[Write]:
        """Take up to ``blocks`` writes from the end."""
        taken: list[Write] = []
        while self._runs and len(taken) < blocks:
            run = self._runs[-1]
            self._growing.pop(run.writes[-1].name, None)
            taken.append(run.writes.pop())
            if not run.writes:
                self._runs.pop()
        self._blocks -= len(taken)
        return taken

    def remove(self, digests: frozenset[bytes] | None) -> list[Write]:
        """Take out the writes of some blocks (None: all), wherever they are."""
        dropped = [write for write in self if digests is None or write.meta.digest in digests]
        if not dropped:
            return dropped
        gone = {id(write) for write in dropped}
        runs, self._runs, self._growing = self._runs, deque(), {}
        for run in runs:
            run.writes = [write for write in run.writes if id(write) not in gone]
            run.full = True  # with a hole in it there is nothing to wait for
            if run.writes:
                self._runs.append(run)
        self._blocks -= len(dropped)
        return dropped

    def __iter__(self) -> Iterator[Write]:
        for run in self._runs:
            yield from run.writes

    def _ready(self, run: _Run, urgent: int, now: float) -> bool:
        return run.full or run.writes[0].seq <= urgent or now >= run.born + HOLD_S

    def _take(self, run: _Run) -> None:
        self._blocks -= len(run.writes)
        last = run.writes[-1].name
        if self._growing.get(last) is run:
            del self._growing[last]

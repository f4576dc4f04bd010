"""Reads blocks of one tier, verifies each where it lies, and hands it to its destination.

Two ways: media that are plain memory (``CALLER_READS``) are read by the calling thread, straight
into the destination.  Everything else is read by the tier's own threads into memory the cache
owns, so that a read which outlives its deadline can never touch a caller's buffer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.errors import BackendError, BackendTimeoutError, KVStoreError, PluginError
from kvstore.l2.border import READING
from kvstore.l2.landing import Frames, Landing
from kvstore.l2.load_times import LoadTimes
from kvstore.l2.receiver import Placer, Receiver, Sink
from kvstore.l2.workers import Job, strided
from kvstore.types import BlockStatus, Call, ReadStatus

if TYPE_CHECKING:
    from kvstore.l2.bad_record import BadRecord
    from kvstore.l2.part import Part
    from kvstore.l2.shelf import CodecShelf
    from kvstore.l2.tier import Tier

FAILED_VERIFICATION: Final = frozenset({BlockStatus.CORRUPT, BlockStatus.MISMATCH})
"""Statuses of blocks whose record was there and was not the one asked for."""

NO_ANSWER: Final = frozenset({BlockStatus.TIMEOUT, BlockStatus.UNAVAILABLE})
"""Statuses that say nothing about whether the block is there."""


def leading_run(statuses: Sequence[BlockStatus]) -> int:
    """How many blocks were delivered before the first that was not."""
    return next((i for i, s in enumerate(statuses) if s is not BlockStatus.DELIVERED), len(statuses))


class TierReader:
    """The read side of one tier; thread-safe."""

    def __init__(self, tier: Tier, shelf: CodecShelf) -> None:
        self.tier = tier
        self.shelf = shelf
        self.frames = Frames(shelf.shape)
        """Staging memory of this tier's reads."""
        self.times = LoadTimes()
        """What reads of this tier took, as their callers saw it."""

    def direct(self, part: Part, sink: Sink, call: Call) -> list[BlockStatus]:
        """Read in the calling thread; ``sink`` gets blocks in order.

        With ``call.leading_only`` the sink gets the leading run only: nothing after the first
        block that is absent or fails verification.  What ``sink`` raises is raised here.
        """
        names = self.tier.guarded("epoch", lambda: self.tier.names_of(part, call))
        if names is None:
            return [BlockStatus.UNAVAILABLE] * len(part)
        receiver = Receiver(self.shelf, names, part.digests, sink, call)
        said = self.tier.guarded(READING, lambda: self.tier.read(names, receiver.receive, call))
        return self._conclude(receiver, said, len(part), in_worker=False)

    def begin(self, part: Part, landing: Landing, call: Call) -> PooledRead:
        """Start to read in the tier's threads; while the tier is suspended nothing is started."""
        if self.tier.suspended:
            self.tier.probe(part)
            return PooledRead(self.tier, landing, len(part))
        return PooledRead(self.tier, landing, len(part), self._deal(part, landing, call))

    def note_read(self, n_blocks: int, seconds: float, *, failed: bool) -> None:
        """Note what a read brought, and how long its caller spent on it.

        A read that brought nothing because the medium failed counts as a block that took the deadline;
        nothing is noted of blocks that are not there, or while the tier is suspended.
        """
        if n_blocks:
            self.times.note(n_blocks, seconds)
        elif failed and not self.tier.suspended:
            self.times.note(1, max(seconds, self.tier.settings.deadline_s))

    def condemn(self, bad: Iterable[BadRecord], *, in_worker: bool) -> None:
        """Count and drop records that failed verification."""
        for record in bad:
            self.tier.condemn(record, in_worker=in_worker)

    def _deal(self, part: Part, landing: Landing, call: Call) -> list[Share]:
        """One share for each thread; a medium with threads of its own gets everything in one call."""
        shares = []
        for indices in strided(len(part), 1 if self.tier.parallel else self.tier.workers.size):
            # a call of its own: a share that ends at a bad record must not stop the others
            own = Call(call.deadline, leading_only=call.leading_only)
            shares.append(self._share(part.among(indices), landing, indices, own))
        return shares

    def _share(self, part: Part, landing: Landing, indices: range, call: Call) -> Share:
        def late() -> None:
            done = share.job.result or [BlockStatus.UNAVAILABLE] * len(indices)
            arrived = [i for i, s in zip(indices, done, strict=True) if s is BlockStatus.DELIVERED]
            if not share.left:
                self.tier.counters.add(late=len(arrived))
            landing.settle(indices, arrived)

        share = Share(indices, call, Job(lambda: self._read(part, landing, indices, call), late))
        return share

    def _read(self, part: Part, landing: Landing, indices: range, call: Call) -> list[BlockStatus]:
        """Read in a worker; what was verified counts, even if the backend fails afterwards."""
        names = self.tier.guarded("epoch", lambda: self.tier.names_of(part, call))
        if names is None:
            return [BlockStatus.UNAVAILABLE] * len(part)
        placer = self._placer(part, names, landing, indices, call)
        said = self.tier.guarded(READING, lambda: self._ask(names, placer, call))
        again = self._worth_another_look(placer, call, len(part))
        if not again:
            return self._conclude(placer, said, len(part), in_worker=True)
        placer.finish()
        self.tier.counters.add(reread=len(placer.bad))
        statuses = self._statuses(placer, said, len(part))
        second = Call(call.deadline, leading_only=call.leading_only, run=call.run)
        some = [names[k] for k in again]
        placer = self._placer(part.among(again), some, landing, [indices[k] for k in again], second)
        said = self.tier.guarded(READING, lambda: self._ask(some, placer, second))
        for k, status in zip(again, self._conclude(placer, said, len(again), in_worker=True), strict=True):
            statuses[k] = status
        return statuses

    def _worth_another_look(self, receiver: Receiver, call: Call, n: int) -> Sequence[int]:
        """Which blocks to read a second time: what came damaged, and what was skipped because of it.

        Whole objects travel: what fails verification may have been damaged on its way, and a good
        object must not be dropped for that.
        """
        if not (receiver.bad and self.tier.asks_by_reading) or receiver.sink_error is not None:
            return ()
        if call.leading_only:  # the call was cancelled at the first bad record
            return [k for k in range(min(receiver.bad), n) if k not in receiver.delivered] if call.remaining() else ()
        return () if call.stop() else sorted(receiver.bad)

    def _placer(
        self, part: Part, names: Sequence[bytes], landing: Landing, indices: Sequence[int], call: Call
    ) -> Placer:
        return Placer(self.shelf, names, part.digests, call, landing=landing, indices=indices, frames=self.frames)

    def _ask(self, names: Sequence[bytes], placer: Placer, call: Call) -> list[ReadStatus]:
        if self.tier.places:
            return self.tier.read_into(names, placer.place, placer.done, call)
        return self.tier.read(names, placer.receive, call)

    def _conclude(
        self, receiver: Receiver, said: list[ReadStatus] | None, n: int, *, in_worker: bool
    ) -> list[BlockStatus]:
        receiver.finish()
        self.condemn(receiver.bad.values(), in_worker=in_worker)
        if receiver.sink_error is not None:
            raise receiver.sink_error
        return self._statuses(receiver, said, n)

    def _statuses(self, receiver: Receiver, said: list[ReadStatus] | None, n: int) -> list[BlockStatus]:
        if receiver.decoding is not None:
            self.tier.decoding = receiver.decoding
        return [receiver.status(i, s) for i, s in enumerate(said or [ReadStatus.UNAVAILABLE] * n)]


@dataclass(slots=True)
class Share:
    """The part of a read that one thread does.

    Attributes:
        indices: Blocks of the read.
        call: Limits of its backend call.
        job: The work; owns the landing memory of its blocks until it ends.
        left: Nobody waits for it any more, though it was not late.
    """

    indices: range
    call: Call
    job: Job[list[BlockStatus]]
    left: bool = False


class PooledRead:
    """A read by the tier's threads that has begun; belongs to one thread.

    Exactly one of :meth:`finish` and :meth:`leave` ends it.

    Args:
        tier: Whose threads read.
        landing: Where the blocks land.
        n_blocks: Blocks asked for.
        shares: What the threads have to do; without any, every block is UNAVAILABLE.
    """

    def __init__(self, tier: Tier, landing: Landing, n_blocks: int, shares: Sequence[Share] = ()) -> None:
        self._tier = tier
        self._landing = landing
        self._n_blocks = n_blocks
        self._shares: list[Share] = []
        self._failure: KVStoreError | None = None
        try:
            for share in shares:
                tier.workers.submit(share.job)
                self._shares.append(share)
        except BackendError as e:
            self._failure = e
        except BaseException:
            self._abandon()
            raise

    def extend(self, until: float) -> None:
        """Allow the tier its whole deadline from now on, up to ``until``."""
        deadline = min(time.monotonic() + self._tier.settings.deadline_s, until)
        for share in self._shares:
            share.call.deadline = max(share.call.deadline, deadline)

    def finish(self) -> list[BlockStatus]:
        """Wait for every share until its deadline; what is not there by then belongs to the late read.

        One failure is noted, however many shares failed.
        """
        try:
            statuses = self._collect()
        except BaseException:  # interrupted: what still runs keeps its memory until it ends
            self._abandon()
            raise
        if self._failure is not None:
            self._tier.failed(READING, self._failure)
        return statuses

    def leave(self) -> list[BlockStatus]:
        """End without waiting: what still runs is asked to stop, and keeps its memory until it has.

        Returns what is there by now.
        """
        self._abandon()
        statuses = [BlockStatus.UNAVAILABLE] * self._n_blocks
        for share in self._shares:
            if share.job.result is not None and not self._landing.abandoned.intersection(share.indices):
                self._put(share, share.job.result, statuses)
        return statuses

    def _abandon(self) -> None:
        for share in self._shares:
            share.left = True
            share.call.cancel()
            if not self._tier.workers.leave(share.job, self._tier.settings.deadline_s):
                self._landing.abandoned.update(share.indices)

    @staticmethod
    def _put(share: Share, found: Sequence[BlockStatus], statuses: list[BlockStatus]) -> None:
        for i, status in zip(share.indices, found, strict=True):
            statuses[i] = status

    def _collect(self) -> list[BlockStatus]:
        statuses = [BlockStatus.UNAVAILABLE] * self._n_blocks
        for share in self._shares:
            try:
                found = self._tier.workers.collect(share.job, share.call)
            except BackendTimeoutError as e:
                self._failure = e
                self._landing.abandoned.update(share.indices)
                found = [BlockStatus.TIMEOUT] * len(share.indices)
            except Exception as e:  # noqa: BLE001 - border: a plugin's bug must not reach the engine
                text = f"reading tier {self._tier.name!r}: {e!r}"
                self._failure = e if isinstance(e, KVStoreError) else PluginError(text)
                continue
            self._put(share, found, statuses)
        return statuses

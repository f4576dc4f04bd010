"""Reads blocks of one tier, verifies each where it lies, and hands it to its destination.

Two ways: media that are plain memory (``CALLER_READS``) are read by the calling thread, straight
into the destination.  Everything else is read by the tier's own threads into memory the cache
owns, so that a read which outlives its deadline can never touch a caller's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import BackendError, BackendTimeoutError, CorruptRecordError, KVStoreError, PluginError
from kvstore.l2.workers import Job, strided
from kvstore.types import BlockStatus, Call, ReadStatus

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.l2.shelf import CodecShelf
    from kvstore.l2.tier import Tier

Sink = Callable[[int, "OpenBlock"], None]
"""``sink(i, block)``: take verified block ``i``; runs while the medium's view is valid."""

_CHECKSUM_END = 192
_STATUS = {
    ReadStatus.OK: BlockStatus.ABSENT,  # said OK but delivered nothing: overwritten when it did
    ReadStatus.ABSENT: BlockStatus.ABSENT,
    ReadStatus.SKIPPED: BlockStatus.ABSENT,
    ReadStatus.TIMEOUT: BlockStatus.TIMEOUT,
    ReadStatus.UNAVAILABLE: BlockStatus.UNAVAILABLE,
    ReadStatus.DENIED: BlockStatus.UNAVAILABLE,
}
_MISMATCH_REASONS = frozenset({"key", "spec"})


@dataclass(frozen=True, slots=True)
class _Bad:
    name: bytes
    header_checksum: int
    error: CorruptRecordError


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a read that one thread does."""

    indices: range
    call: Call
    job: Job[list[BlockStatus]]


class _Receiver:
    """Verifies the records of one backend call and passes the good ones on."""

    def __init__(
        self, reader: TierReader, names: Sequence[bytes], digests: Sequence[bytes], sink: Sink, call: Call
    ) -> None:
        self._tier = reader.tier
        self._decoder = reader.shelf.decoder()
        self._names = names
        self._digests = digests
        self._sink = sink
        self._call = call
        self.delivered: set[int] = set()
        self.bad: dict[int, _Bad] = {}
        self.sink_error: Exception | None = None

    def __call__(self, i: int, view: memoryview) -> None:
        if self.sink_error is not None:
            return
        try:
            block = self._decoder.open(view, self._digests[i])
        except CorruptRecordError as e:
            short = view.nbytes < _CHECKSUM_END
            checksum = 0 if short else int.from_bytes(view[_CHECKSUM_END - 8 : _CHECKSUM_END], "little")
            self.bad[i] = _Bad(self._names[i], checksum, e)
            if self._call.leading_only:
                self._call.cancel()
            return
        try:
            self._sink(i, block)
        except Exception as e:  # noqa: BLE001 - the destination's fault, raised to its owner and not blamed on the tier
            self.sink_error = e
            self._call.cancel()
            return
        self._tier.decoding = not block.is_raw
        self._decoder.recycle()
        self.delivered.add(i)

    def status(self, i: int, said: ReadStatus) -> BlockStatus:
        if i in self.delivered:
            return BlockStatus.DELIVERED
        bad = self.bad.get(i)
        if bad is not None:
            return BlockStatus.MISMATCH if bad.error.reason in _MISMATCH_REASONS else BlockStatus.CORRUPT
        return _STATUS[said]


class TierReader:
    """The read side of one tier; thread-safe."""

    def __init__(self, tier: Tier, shelf: CodecShelf) -> None:
        self.tier = tier
        self.shelf = shelf

    def direct(self, kind: int, digests: Sequence[bytes], sink: Sink, call: Call) -> list[BlockStatus]:
        """Read in the calling thread; ``sink`` gets blocks in order.

        With ``call.leading_only`` the sink gets the leading run only: nothing after the first
        block that is absent or fails verification.  What ``sink`` raises is raised here.
        """
        return self._read(kind, digests, sink, call, in_worker=False)

    def pooled(self, kind: int, digests: Sequence[bytes], landing: Landing, call: Call) -> list[BlockStatus]:
        """Read in the tier's threads into ``landing`` buffers, waiting at most the deadline."""
        started: list[_Share] = []
        try:
            failure = self._start(kind, digests, landing, call, started)
            return self._collect(len(digests), landing, started, failure)
        except BaseException:  # interrupted: what still runs keeps its buffers until it ends
            for share in started:
                if not share.job.wait(0):
                    landing.abandoned.update(share.indices)
            raise

    def _read(
        self, kind: int, digests: Sequence[bytes], sink: Sink, call: Call, *, in_worker: bool
    ) -> list[BlockStatus]:
        """Read in the current thread; what was verified counts, even if the backend fails afterwards."""
        n = len(digests)
        names = self.tier.guarded("epoch", lambda: self.tier.names(kind, digests))
        if names is None:
            return [BlockStatus.UNAVAILABLE] * n
        receiver = _Receiver(self, names, digests, sink, call)
        said = self.tier.guarded("get_many", lambda: self.tier.read(names, receiver, call))
        self._condemn(receiver, in_worker=in_worker)
        if receiver.sink_error is not None:
            raise receiver.sink_error
        return [receiver.status(i, s) for i, s in enumerate(said or [ReadStatus.UNAVAILABLE] * n)]

    def _start(
        self, kind: int, digests: Sequence[bytes], landing: Landing, call: Call, started: list[_Share]
    ) -> BackendError | None:
        """Deal the blocks to the tier's threads; returns what kept it from starting all shares."""
        try:
            for indices in strided(len(digests), self.tier.workers.size):
                # a call of its own: a share that ends at a bad record must not stop the others
                own = Call(call.deadline, leading_only=call.leading_only)
                started.append(_Share(indices, own, self._share(kind, digests, indices, landing, own)))
        except BackendError as e:
            return e
        return None

    def _collect(
        self, n: int, landing: Landing, started: Sequence[_Share], failure: KVStoreError | None
    ) -> list[BlockStatus]:
        """Wait for every started share, whatever goes wrong: it owns its landing buffers until then."""
        statuses = [BlockStatus.UNAVAILABLE] * n
        for share in started:
            try:
                found = self.tier.workers.collect(share.job, share.call)
            except BackendTimeoutError as e:
                failure = e
                landing.abandoned.update(share.indices)
                found = [BlockStatus.TIMEOUT] * len(share.indices)
            except Exception as e:  # noqa: BLE001 - border: a plugin's bug must not reach the engine
                text = f"get_many of tier {self.tier.name!r}: {e!r}"
                failure = e if isinstance(e, KVStoreError) else PluginError(text)
                continue
            for i, status in zip(share.indices, found, strict=True):
                statuses[i] = status
        if failure is not None:
            self.tier.failed("get_many", failure)
        return statuses

    def _share(
        self, kind: int, digests: Sequence[bytes], share: range, landing: Landing, call: Call
    ) -> Job[list[BlockStatus]]:
        part = [digests[i] for i in share]

        def sink(k: int, block: OpenBlock) -> None:
            block.write_into(landing.buffer(share[k]))

        def late() -> None:
            done = job.result or [BlockStatus.UNAVAILABLE] * len(share)
            arrived = [i for i, s in zip(share, done, strict=True) if s is BlockStatus.DELIVERED]
            self.tier.counters.add(late=len(arrived))
            landing.settle(share, arrived)

        job: Job[list[BlockStatus]] = Job(lambda: self._read(kind, part, sink, call, in_worker=True), late)
        self.tier.workers.submit(job)
        return job

    def _condemn(self, receiver: _Receiver, *, in_worker: bool) -> None:
        """Count and drop records that failed verification, so that they are not offered again."""
        for bad in receiver.bad.values():
            if bad.error.reason == "key":
                self.tier.counters.add(key_mismatch=1)
            elif bad.error.reason == "spec":
                self.tier.counters.add(spec_mismatch=1)
            else:
                self.tier.counters.add(corrupt=1)
            self.tier.emit("corrupt", (bad.name[-32:],), bad.error.reason)
            self.tier.discard(bad.name, bad.header_checksum, in_worker=in_worker)


class Landing:
    """Memory owned by the cache in which pooled reads land.

    Blocks whose read outlives the deadline belong to the read until it ends; ``settle`` then
    decides about them.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.abandoned: set[int] = set()

    def buffer(self, i: int) -> memoryview:
        """Writable bytes for block ``i``."""
        return self._buffers[i]

    def settle(self, share: range, arrived: Sequence[int]) -> None:
        """Called by a late read at its end; plain staging memory is simply let go."""

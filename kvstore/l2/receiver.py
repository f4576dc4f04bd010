"""Verifies the records of one backend call and passes the good ones on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.blocks_memory import copy_bytes
from kvstore.errors import CorruptRecordError
from kvstore.l2.bad_record import BadRecord
from kvstore.none_codec import NoneCodec
from kvstore.types import BlockStatus, Call, ReadStatus

if TYPE_CHECKING:
    from kvstore.backend import RecordInfo
    from kvstore.blocks import OpenBlock
    from kvstore.l2.landing import Frame, Frames, Landing, RecordShape
    from kvstore.l2.shelf import CodecShelf

Sink = Callable[[int, "OpenBlock"], None]
"""``sink(i, block)``: take verified block ``i``; runs while the medium's view is valid."""

_CHECKSUM_END: Final = 192
_STATUS: Final = {
    ReadStatus.OK: BlockStatus.ABSENT,  # said OK but delivered nothing: overwritten when it did
    ReadStatus.ABSENT: BlockStatus.ABSENT,
    ReadStatus.SKIPPED: BlockStatus.ABSENT,
    ReadStatus.TIMEOUT: BlockStatus.TIMEOUT,
    ReadStatus.UNAVAILABLE: BlockStatus.UNAVAILABLE,
    ReadStatus.DENIED: BlockStatus.UNAVAILABLE,
}
_MISMATCH_REASONS: Final = frozenset({"key", "spec"})
_MAYBE_RAW: Final = frozenset({NoneCodec.codec_id, -1})  # -1: the medium does not know


class Receiver:
    """Takes records as views that are valid during the call only.

    ``receive`` may run in several threads at once, for different records.  Nothing is raised into
    the backend: what ``sink`` raises is kept in :attr:`sink_error`, and ends the call.

    Args:
        shelf: Decoders, one for each thread.
        names: Stored names that the backend is asked for.
        digests: Digest of each.
        sink: Takes the good blocks.
        call: Limits of the backend call.
    """

    def __init__(
        self, shelf: CodecShelf, names: Sequence[bytes], digests: Sequence[bytes], sink: Sink, call: Call
    ) -> None:
        self._shelf = shelf
        self._names = names
        self._digests = digests
        self._sink = sink
        self._call = call
        self._over = False
        self.delivered: set[int] = set()
        self.bad: dict[int, BadRecord] = {}
        self.sink_error: Exception | None = None
        self.decoding: bool | None = None
        """Whether the newest good record had to be decoded; None before there was one."""

    def receive(self, i: int, view: memoryview) -> None:
        """Verify record ``i`` and hand it to the sink."""
        if self.sink_error is not None or self._over:
            return
        decoder = self._shelf.decoder()
        try:
            block = decoder.open(view, self._digests[i])
        except CorruptRecordError as e:
            self._reject(i, view, e)
            return
        try:
            self._sink(i, block)
        except Exception as e:  # noqa: BLE001 - the destination's fault, raised to its owner and not blamed on the tier
            self.sink_error = e
            self._call.cancel()
            return
        self.decoding = not block.is_raw
        decoder.recycle()
        self._deliver(i)

    def _deliver(self, i: int) -> None:
        self.delivered.add(i)
        if self.bad:
            self._end_behind_bad()

    def _reject(self, i: int, view: memoryview | None, error: CorruptRecordError) -> None:
        checksum = None
        if view is not None:
            short = view.nbytes < _CHECKSUM_END
            checksum = 0 if short else int.from_bytes(view[_CHECKSUM_END - 8 : _CHECKSUM_END], "little")
        # kept without its frames, which would keep the medium's memory and connections in a cycle
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.bad[i] = BadRecord(self._names[i], checksum, error, self._call.run)
        self._end_behind_bad()

    def _end_behind_bad(self) -> None:
        """What follows a bad record is of no use to a leading read; what precedes it may still be on its way."""
        if self._call.leading_only and self.delivered.issuperset(range(min(self.bad))):
            self._call.cancel()

    def finish(self) -> None:
        """The backend has answered: what it still says about this call does not count."""
        self._over = True

    def status(self, i: int, said: ReadStatus) -> BlockStatus:
        """What became of block ``i``, of which the backend said ``said``."""
        if i in self.delivered:
            return BlockStatus.DELIVERED
        bad = self.bad.get(i)
        if bad is not None:
            return BlockStatus.MISMATCH if bad.error.reason in _MISMATCH_REASONS else BlockStatus.CORRUPT
        return _STATUS[said]


class Placer(Receiver):
    """Gives the backend memory to read into: the block's own where the record is the block, else staging.

    ``place``, ``done`` and ``receive`` may run in several threads at once, for different records.

    Args:
        landing: Where block ``indices[k]`` belongs.
        frames: Staging memory for records that have to be decoded.
    """

    def __init__(  # noqa: PLR0913 - what a read consists of
        self,
        shelf: CodecShelf,
        names: Sequence[bytes],
        digests: Sequence[bytes],
        call: Call,
        *,
        landing: Landing,
        indices: Sequence[int],
        frames: Frames,
    ) -> None:
        super().__init__(shelf, names, digests, self._write, call)
        self._shape: RecordShape = shelf.shape
        self._landing = landing
        self._indices = indices
        self._frames = frames
        self._asked: set[int] = set()
        self._places: dict[int, tuple[memoryview, Frame | None]] = {}  # not done yet: record, staging frame

    def _write(self, k: int, block: OpenBlock) -> None:
        block.write_into(self._landing.frame(self._indices[k]).block)

    def place(self, k: int, info: RecordInfo) -> Sequence[memoryview] | None:
        """Buffers for record ``k``; None for what cannot be a record of this spec, and for repetitions."""
        if self._over or self.sink_error is not None or k in self._asked:
            return None
        self._asked.add(k)
        if not self._shape.possible(info.head_bytes, info.payload_bytes):
            detail = f"a record of {info.head_bytes} and {info.payload_bytes} bytes, longer than any of this spec"
            self._reject(k, None, CorruptRecordError("length", detail))
            return None
        try:
            view, staging = self._room(k, info)
        except Exception as e:  # noqa: BLE001 - no memory: raised to the caller and not blamed on the tier
            self.sink_error = e
            self._call.cancel()
            return None
        self._places[k] = (view, staging)
        return [view]

    def _room(self, k: int, info: RecordInfo) -> tuple[memoryview, Frame | None]:
        shape = self._shape
        if info.nbytes == shape.plain_head_bytes + shape.block_bytes and info.codec_id in _MAYBE_RAW:
            view = self._landing.frame(self._indices[k]).record(shape.plain_head_bytes, shape.block_bytes)
            if view is not None:
                return view, None
        head_bytes = info.head_bytes or min(shape.plain_head_bytes, info.nbytes)
        staging = self._frames.take()
        room = staging.record(head_bytes, info.nbytes - head_bytes)
        if room is None:
            msg = f"no staging room for a record of {head_bytes} and {info.nbytes - head_bytes} bytes"
            raise MemoryError(msg)
        return room, staging

    def done(self, k: int) -> None:
        """Record ``k`` is complete in its place."""
        placed = self._places.pop(k, None)
        if placed is None:
            return
        view, staging = placed
        if staging is None:
            self._take_in_place(k, view)
        else:
            self.receive(k, view)
            self._frames.give([staging])

    def _take_in_place(self, k: int, view: memoryview) -> None:
        """The record lies where its payload belongs: nothing is left to do once it is verified."""
        if self.sink_error is not None or self._over:
            return
        decoder = self._shelf.decoder()
        try:
            block = decoder.open(view, self._digests[k])
        except CorruptRecordError as e:
            self._reject(k, view, e)
            return
        if block.is_raw and block.token_ids is None:
            self.decoding = False
            self._deliver(k)
            return
        decoder.recycle()
        staging = self._frames.take()  # as long as the block, yet encoded: it must not be decoded onto itself
        moved = staging.record(self._shape.plain_head_bytes, self._shape.block_bytes)
        if moved is not None:
            copy_bytes(moved, view)
            self.receive(k, moved)
        self._frames.give([staging])

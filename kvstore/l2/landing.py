"""Memory owned by the cache in which records and blocks land, page-aligned for direct I/O."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.record import ENTRY_BYTES, HEADER_BYTES, KEYED_ENTRY_BYTES
from kvstore.segments import MAX_SEAL_BYTES, plan_segments

if TYPE_CHECKING:
    from kvstore.spec import BlockSpec

PAGE_BYTES: Final = 4096
_KEPT_BYTES: Final = 64 << 20  # frames kept for reuse: what one call has in flight; fresh pages cost as much as a copy

_PIECE_BYTES: Final = 16 << 20  # taken from the system at once; 8 huge pages


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Lengths of the records of one spec, in bytes.

    Attributes:
        block_bytes: The block itself.
        plain_head_bytes: Head of an uncompressed record, which has ``block_bytes`` behind it.
        own_head_bytes: No head that this cache takes is longer.
        longest_head_bytes: No head is longer.
        longest_payload_bytes: Nothing behind a head is longer: each segment is stored raw or sealed at worst.
        longest_seal_bytes: What sealing adds to a block at most.
    """

    block_bytes: int
    plain_head_bytes: int
    own_head_bytes: int
    longest_head_bytes: int
    longest_payload_bytes: int
    longest_seal_bytes: int

    @classmethod
    def of(cls, spec: BlockSpec, *, keyed: bool = False) -> RecordShape:
        """Lengths for a spec; a record may carry the block's token ids, 4 bytes each, as one more segment.

        Args:
            spec: Of every block.
            keyed: Whether the cache has keys for its records.
        """
        segments = len(plan_segments(spec))
        entry_bytes = KEYED_ENTRY_BYTES if keyed else ENTRY_BYTES
        seal_bytes = MAX_SEAL_BYTES * segments
        return cls(
            block_bytes=spec.nbytes,
            plain_head_bytes=HEADER_BYTES + entry_bytes * segments,
            own_head_bytes=HEADER_BYTES + entry_bytes * (segments + 1),
            longest_head_bytes=HEADER_BYTES + KEYED_ENTRY_BYTES * (segments + 1),
            longest_payload_bytes=spec.nbytes + max(4 * spec.block_tokens, seal_bytes),
            longest_seal_bytes=seal_bytes,
        )

    def possible(self, head_bytes: int, payload_bytes: int) -> bool:
        """Whether any sound record of the spec has these lengths; ``head_bytes`` is 0 when unknown."""
        longest = self.longest_head_bytes + self.longest_payload_bytes
        return 0 <= head_bytes <= self.longest_head_bytes and 0 <= payload_bytes <= longest - head_bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """Writable memory with room for a head in front of a page-aligned payload.

    Attributes:
        memory: All of it.
        payload_at: Where the payload begins.
        block_bytes: Length of a block.
    """

    memory: memoryview
    payload_at: int
    block_bytes: int

    @property
    def block(self) -> memoryview:
        """The bytes of one block, where the payload of an uncompressed record is."""
        return self.memory[self.payload_at : self.payload_at + self.block_bytes]

    def record(self, head_bytes: int, payload_bytes: int) -> memoryview | None:
        """Contiguous room for a record whose payload is aligned; None when it does not fit."""
        begin, end = self.payload_at - head_bytes, self.payload_at + payload_bytes
        return self.memory[begin:end] if begin >= 0 and end <= len(self.memory) else None


class Frames:
    """Frames for records of one spec, reused; thread-safe.

    Never waits for a frame to come back.  Up to 64 MiB (at least two frames) are kept for the next
    call.  Small frames are cut from one piece of memory, with huge pages where the kernel has them.

    Args:
        shape: What must fit in.
    """

    def __init__(self, shape: RecordShape) -> None:
        self._shape = shape
        self._payload_at = _whole_pages(shape.longest_head_bytes)
        self._nbytes = self._payload_at + _whole_pages(shape.longest_head_bytes + shape.longest_payload_bytes)
        self._cutting = threading.Lock()
        self._free: deque[Frame] = deque(maxlen=max(2, _KEPT_BYTES // self._nbytes))

    def take(self) -> Frame:
        """A frame with any content."""
        try:
            return self._free.pop()
        except IndexError:
            with self._cutting:  # threads that run out at the same time share one piece
                if not self._free:
                    self._free.extend(self._cut())
            return self.take()

    def _cut(self) -> list[Frame]:
        """Make frames from fresh memory."""
        count = max(1, min(_PIECE_BYTES // self._nbytes, self._free.maxlen or 1))
        piece = mmap.mmap(-1, count * self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            piece.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(piece)
        cuts = range(0, count * self._nbytes, self._nbytes)
        return [Frame(view[at : at + self._nbytes], self._payload_at, self._shape.block_bytes) for at in cuts]

    def give(self, frames: Iterable[Frame]) -> None:
        """Take frames back that nothing reads or writes any more."""
        self._free.extend(frames)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Landing:
    """Where the blocks of one pooled read land: frames of staging memory, taken as blocks arrive.

    Blocks whose read outlives the deadline belong to the read until it ends; :meth:`settle` then
    decides about them.  Different blocks may be asked for by different threads at once.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._staged: dict[int, Frame] = {}
        self.abandoned: set[int] = set()

    def frame(self, i: int) -> Frame:
        """Memory for block ``i``, the same each time."""
        frame = self._staged.get(i)
        if frame is None:
            frame = self._staged[i] = self._frames.take()
        return frame

    def release(self, blocks: Iterable[int]) -> None:
        """Nobody needs the staging memory of these blocks any more."""
        self._frames.give([self._staged.pop(i) for i in blocks if i in self._staged])

    def settle(self, share: Sequence[int], arrived: Sequence[int]) -> None:
        """Called by a read that nobody waits for any more, at its end."""
        del arrived
        self.release(share)

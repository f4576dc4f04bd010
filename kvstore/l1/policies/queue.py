"""What policies with one queue have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvstore.eviction import EvictionPolicy


class QueuePolicy(EvictionPolicy):
    """One queue of resident digests, next victim first; subclasses decide who enters where.

    A block that cannot be evicted is in use, so a search for a victim sends it to the far end.
    That keeps the search O(1) amortised however many blocks are pinned, and keeps the order among
    the blocks sent there.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[bytes, None] = OrderedDict()

    def remove(self, digest: bytes) -> None:
        """Forget a block that was deleted."""
        self._queue.pop(digest, None)

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Forget and return the first evictable block; each block is looked at once at most."""
        queue = self._queue
        for _ in range(len(queue)):
            digest = next(iter(queue))
            if evictable(digest):
                del queue[digest]
                return digest
            queue.move_to_end(digest)
        return None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue)

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()

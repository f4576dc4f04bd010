"""S3-FIFO: a small queue filters one-hit wonders, a main queue keeps what comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore.eviction import EvictionPolicy

_MAX_USES: Final = 3  # two bits a block, as in the paper
_PROMOTE_ABOVE: Final = 1  # uses in the small queue above which a block is kept
_SMALL_SHARE: Final = 10  # the small queue is a tenth of the capacity


class S3FifoPolicy(EvictionPolicy):
    """Three FIFO queues (Yang et al., SOSP 2023).

    J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vigfusson, "FIFO queues are all you need for cache
    eviction", SOSP 2023, algorithm 1.

    A new block enters ``small``.  At its end it moves to ``main`` if it was used more than once
    since, otherwise it is evicted and its digest remembered in ``ghost``; a block that comes back
    while remembered enters ``main``.  ``main`` gives a block one more round for each use.  Two
    deviations: ``ghost`` holds as many digests as L1 holds blocks (the paper: as ``main`` holds),
    and the blocks of one request enter tail first.  A pinned block that is met goes another round.

    Args:
        capacity_blocks: Blocks that fit into L1, at least 1.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._ghost_blocks = capacity_blocks
        self._small_blocks = max(1, capacity_blocks // _SMALL_SHARE)
        self._small: OrderedDict[bytes, int] = OrderedDict()  # digest -> uses, oldest first
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, digests: Sequence[bytes]) -> None:
        """Note new blocks, tail first; remembered ones go to the main queue."""
        for digest in reversed(digests):
            if digest in self._ghost:
                del self._ghost[digest]
                self._main[digest] = 0
            elif digest not in self._main:
                self._small.setdefault(digest, 0)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Count one use of each block; unknown digests are ignored."""
        for digest in digests:
            for queue in (self._small, self._main):
                uses = queue.get(digest)
                if uses is not None:
                    if uses < _MAX_USES:
                        queue[digest] = uses + 1
                    break

    def remove(self, digest: bytes) -> None:
        """Forget a block that was deleted, also as a remembered one."""
        for queue in (self._small, self._main, self._ghost):
            queue.pop(digest, None)

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Forget and return one evictable block; each is looked at a bounded number of times."""
        order: tuple[Callable[[Callable[[bytes], bool]], bytes | None], ...]
        if self._small_first():
            order = (self._evict_small, self._evict_main)
        else:  # main again, for blocks that the small queue has just promoted
            order = (self._evict_main, self._evict_small, self._evict_main)
        for step in order:
            victim = step(evictable)
            if victim is not None:
                return victim
        return None

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[bytes]:
        first, second = (self._small, self._main) if self._small_first() else (self._main, self._small)
        yield from first
        yield from second

    def clear(self) -> None:
        """Forget everything, remembered digests included."""
        for queue in (self._small, self._main, self._ghost):
            queue.clear()

    @property
    def ghost_blocks(self) -> int:
        """Digests remembered after their eviction."""
        return len(self._ghost)

    def _small_first(self) -> bool:
        return len(self._small) >= self._small_blocks or not self._main

    def _evict_small(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._small)):
            digest, uses = self._small.popitem(last=False)
            if uses > _PROMOTE_ABOVE:
                self._main[digest] = 0
            elif evictable(digest):
                self._remember(digest)
                return digest
            else:
                self._small[digest] = uses
        return None

    def _evict_main(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        skipped = 0  # pinned blocks in a row; a whole round of them means that there is nothing else
        while skipped < len(self._main):
            digest, uses = self._main.popitem(last=False)
            if not evictable(digest):
                self._main[digest] = uses
                skipped += 1
            elif uses:
                self._main[digest] = uses - 1
                skipped = 0
            else:
                return digest
        return None

    def _remember(self, digest: bytes) -> None:
        self._ghost[digest] = None
        if len(self._ghost) > self._ghost_blocks:
            self._ghost.popitem(last=False)

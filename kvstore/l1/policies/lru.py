"""Least recently used."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.l1.policies.queue import QueuePolicy


class LruPolicy(QueuePolicy):
    """Evicts the block whose last use is longest ago; the head of a request is its oldest block."""

    def insert(self, digests: Sequence[bytes]) -> None:
        """Note new blocks, head first, as the most recently used ones."""
        self._queue.update(dict.fromkeys(digests))

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note one use, head first; unknown digests are ignored."""
        queue = self._queue
        for digest in digests:
            if digest in queue:
                queue.move_to_end(digest)

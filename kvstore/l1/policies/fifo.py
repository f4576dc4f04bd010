"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.l1.policies.queue import QueuePolicy


class FifoPolicy(QueuePolicy):
    """Evicts in order of arrival; a request is one arrival and leaves tail first."""

    def insert(self, digests: Sequence[bytes]) -> None:
        """Note new blocks, the tail as the first to go."""
        self._queue.update(dict.fromkeys(digests[::-1]))

    def touch(self, digests: Sequence[bytes]) -> None:
        """Do nothing: only arrival counts."""

"""The contract of an L1 eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence


class EvictionPolicy(ABC):
    """Decides which resident block leaves L1 first; keeps digests only, never bytes.

    The pool calls every method under its own lock, so implementations need no locking.  All
    methods take the blocks of one request together, in key order (head first), because a request
    is one recency event.
    """

    @abstractmethod
    def insert(self, digests: Sequence[bytes]) -> None:
        """Note blocks that became resident."""

    @abstractmethod
    def touch(self, digests: Sequence[bytes]) -> None:
        """Note one use of resident blocks."""

    @abstractmethod
    def remove(self, digest: bytes) -> None:
        """Forget a block that was deleted (not evicted); unknown digests are ignored."""

    @abstractmethod
    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Choose one victim for which ``evictable`` is true, forget it and return it.

        Returns None when no resident block is evictable.  The cost is bounded by the number of
        resident blocks, also when all of them are pinned.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Resident blocks known to the policy."""

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]:
        """Resident digests, next victim first (best effort)."""

    def clear(self) -> None:
        """Forget everything."""
        for digest in list(self):
            self.remove(digest)

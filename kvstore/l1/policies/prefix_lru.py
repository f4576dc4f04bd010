"""Least recently used, tails first."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.l1.policies.lru import LruPolicy


class PrefixLruPolicy(LruPolicy):
    """LRU in which a request's tail is older than its head.

    A cached prefix is useful from its first block to its first hole.  Taking the blocks of a
    request from the tail to the head makes eviction shorten prefixes instead of beheading them: as
    long as every request starts at a sequence's first block, no block outlives its parent.
    """

    def insert(self, digests: Sequence[bytes]) -> None:
        """Note new blocks, the tail as the oldest."""
        super().insert(digests[::-1])

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note one use, the tail as the oldest."""
        super().touch(digests[::-1])

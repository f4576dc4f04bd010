"""From a prefix and a query to the key of whole cache blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.compat.aibrix.sources import KeySource
from kvstore.compat.aibrix.views import KVCacheKeyTypes
from kvstore.errors import KeyMismatchError
from kvstore.keys import KVCacheKey


@dataclass(frozen=True, slots=True)
class Addressed:
    """The whole blocks of a query behind its prefix; hashed when a key is asked for.

    Attributes:
        source: Values of prefix and query.
        start: First value of the prefix in it.
        before: Blocks of the prefix.
        n_blocks: Whole blocks of the query.
        block_tokens: Tokens per block of the cache.
        chained: What block hashes mean.
    """

    source: KeySource
    start: int
    before: int
    n_blocks: int
    block_tokens: int
    chained: bool

    @property
    def hashed(self) -> int:
        """Blocks of the query whose digests are known already."""
        known = self.source.known(self.start, self.block_tokens, chained=self.chained)
        return max(0, min(known - self.before, self.n_blocks))

    def key(self, n_blocks: int | None = None) -> KVCacheKey:
        """The key of the first ``n_blocks`` blocks, all by default.

        Raises:
            ValueError: A token is out of range, or a block hash stands twice in the sequence.
        """
        stop = self.before + (self.n_blocks if n_blocks is None else min(n_blocks, self.n_blocks))
        whole = self.source.key(self.start, stop, self.block_tokens, chained=self.chained)
        return whole if (self.before, stop) == (0, len(whole)) else whole[self.before : stop]


def address(prefix: KVCacheKeyTypes | None, query: KVCacheKeyTypes, block_tokens: int, *, chained: bool) -> Addressed:
    """Say which blocks a call is about.

    Args:
        prefix: What precedes the query, in whole blocks.
        query: The blocks; what is left behind the last whole one is not addressed.
        block_tokens: Tokens per block of the cache.
        chained: Whether block hashes commit to what precedes their block.

    Raises:
        KeyMismatchError: The cache's blocks are no multiple of the hashes' blocks, or the prefix is
            not whole blocks.
    """
    if block_tokens % query.unit_tokens:
        msg = (
            f"block hashes stand for {query.unit_tokens} tokens each, the cache's blocks for {block_tokens}; "
            "expected a divisor"
        )
        raise KeyMismatchError(msg)
    n_prefix = 0 if prefix is None else len(prefix)
    if n_prefix % block_tokens:
        msg = f"the prefix has {n_prefix} tokens; expected whole blocks of {block_tokens}"
        raise KeyMismatchError(msg)
    whole = query if prefix is None or not n_prefix else prefix + query
    source, start = whole.source, whole.start
    return Addressed(source, start, n_prefix // block_tokens, len(query) // block_tokens, block_tokens, chained)

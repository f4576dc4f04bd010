"""Immutable tokens or block hashes, and the keys made from them so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt

from kvstore.keys import KVCacheKey


class KeySource(ABC):
    """Values that views share, so that each block is hashed once for all of them.

    The values never change after construction, hence no cached digest is ever stale.  Threads may
    compute a key twice; both are equal.
    """

    def __init__(self) -> None:
        self._keys: Final[dict[tuple[int, int, bool], KVCacheKey]] = {}

    def known(self, start: int, block_tokens: int, *, chained: bool) -> int:
        """How many blocks from ``start`` on are hashed already."""
        key = self._keys.get((start, block_tokens, chained))
        return 0 if key is None else len(key)

    def key(self, start: int, n_blocks: int, block_tokens: int, *, chained: bool) -> KVCacheKey:
        """A key for at least ``n_blocks`` blocks of the sequence that begins at ``start``.

        Args:
            start: First value.
            n_blocks: Blocks wanted, whole ones that the values have.
            block_tokens: Tokens per block.
            chained: What block hashes mean; tokens take no notice.
        """
        name = (start, block_tokens, chained)
        key = self._keys.get(name)
        if key is None or len(key) < n_blocks:
            # At least twice what was known: a sequence asked for chunk by chunk is hashed twice at most.
            wanted = max(n_blocks, 2 * self.known(start, block_tokens, chained=chained))
            key = self._make(start, wanted, block_tokens, chained=chained)
            self._keys[name] = key
        return key

    @abstractmethod
    def _make(self, start: int, n_blocks: int, block_tokens: int, *, chained: bool) -> KVCacheKey:
        """A key for the first ``n_blocks`` blocks from ``start`` on, or as many as there are."""


class TokenSource(KeySource):
    """Token ids.

    Args:
        values: Integers, one dimension; taken over, so the caller must not change them any more.
    """

    def __init__(self, values: npt.NDArray[Any]) -> None:
        super().__init__()
        values.flags.writeable = False
        self.values: Final = values

    def _make(self, start: int, n_blocks: int, block_tokens: int, *, chained: bool) -> KVCacheKey:
        del chained
        tokens = self.values[start : start + n_blocks * block_tokens]
        return KVCacheKey.from_tokens(tokens, block_tokens=block_tokens)


class HashSource(KeySource):
    """Block hashes.

    Args:
        values: One hash per block of the engine.
        block_tokens: Tokens per block of the engine.
    """

    def __init__(self, values: Sequence[str], block_tokens: int) -> None:
        super().__init__()
        self.values: Final = tuple(values)
        self.block_tokens: Final = block_tokens

    def _make(self, start: int, n_blocks: int, block_tokens: int, *, chained: bool) -> KVCacheKey:
        factor = block_tokens // self.block_tokens
        hashes = self.values[start : start + n_blocks * factor]
        if chained and len(set(hashes)) < len(hashes):
            msg = (
                "a block hash stands twice in one sequence, so hashes do not commit to what precedes their block; "
                'say configure(block_hashes="content") if they name the content of their block only'
            )
            raise ValueError(msg)
        key = KVCacheKey.from_block_hashes(hashes, block_tokens=self.block_tokens, chained=chained)
        return key.coarsen(factor)

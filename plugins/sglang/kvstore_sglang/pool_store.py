"""The stored pages of one host pool."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvstore import KVCache, KVCacheKey
from kvstore.errors import ClosedError, DeadlineError
from kvstore.keys import BlockHashKey
from kvstore.types import Presence
from kvstore_sglang.host_pages import HostPages
from kvstore_sglang.page_format import KV

_GROUP_BITS: Final = 31  # a key's group is below 2**32
_PATIENCE_S: Final = 8.0  # of a put that waits for room; SGLang waits 10 s for its threads when it detaches


@dataclass(frozen=True, slots=True)
class PageKeys:
    """Pages by their hashes.

    Attributes:
        hashes: One page hash each, SGLang's chain.
        before: Hashes of all pages before them, when SGLang gives them: they tell the media that pack
            neighbours together where the pages stand.
    """

    hashes: Sequence[str]
    before: Sequence[str] | None = None


class PoolStore:
    """Puts the pages of one host pool into a cache and gets them back; thread-safe.

    What the store does not have, or cannot give in time, is a miss; no method raises for it, nor for a
    store that was closed meanwhile.  Owns ``cache``.

    Args:
        name: The pool's name; its pages have a key group of their own.
        cache: Open cache whose spec is that of the pages.
        pages: Access to the pool.
        salt: Isolates the keys.
        writes: Whether this rank writes; a replica's pages are left to the one that does.
    """

    def __init__(self, name: str, cache: KVCache, pages: HostPages, *, salt: str | None, writes: bool) -> None:
        self.name = name
        self.cache = cache
        self.pages = pages
        self._group = key_group(name)
        self._salt = salt
        self._writes = writes

    def count(self, keys: PageKeys) -> int:
        """How many leading pages are stored."""
        try:
            return self.cache.lookup(self._key(keys)).blocks
        except ClosedError:
            return 0

    def each(self, keys: PageKeys) -> list[bool]:
        """Which pages are stored."""
        try:
            return [found is Presence.PRESENT for found in self.cache.contains_each(self._key(keys))]
        except ClosedError:
            return [False] * len(keys.hashes)

    def load(self, keys: PageKeys, host_indices: torch.Tensor) -> int:
        """Bring the leading pages into the pool; returns how many, the others are untouched."""
        pages = self.pages.select(host_indices)
        n_pages = self.load_into(keys, pages.to_fill())
        pages.filled(n_pages)
        return n_pages

    def load_into(self, keys: PageKeys, blocks: Sequence[torch.Tensor]) -> int:
        """Copy the leading pages into tensors of the spec; returns how many."""
        try:
            return self.cache.get(self._key(keys), blocks)
        except ClosedError:
            return 0

    def save(self, keys: PageKeys, host_indices: torch.Tensor) -> int:
        """Store pages of the pool; returns how many leading ones were accepted.

        They are copied before the call returns.
        """
        return self.save_from(keys, self.pages.select(host_indices).to_store()) if self._writes else len(keys.hashes)

    def save_from(self, keys: PageKeys, blocks: Sequence[torch.Tensor]) -> int:
        """Store tensors of the spec; returns how many leading ones were accepted.

        When the write queue is full, waits for room as long as there is progress, 8 s in all: SGLang's
        backup thread has nothing better to do, and gives up the rest of a prefix after a refusal.
        """
        if not self._writes:
            return len(keys.hashes)
        key = self._key(keys)
        until = time.monotonic() + _PATIENCE_S
        done = 0
        try:
            done = self.cache.put(key, blocks)
            while done < len(key) and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(DeadlineError):
                    self.cache.flush(min(left, self.cache.config.defaults.deadline))
                accepted = self.cache.put(key.suffix(done), blocks[done:])
                if not accepted:
                    break
                done += accepted
        except ClosedError:
            pass
        return done

    def _key(self, keys: PageKeys) -> BlockHashKey:
        return KVCacheKey.from_block_hashes(
            keys.hashes,
            block_tokens=self.cache.spec.block_tokens,
            chained=True,
            prefix=keys.before,
            salt=self._salt,
            group=self._group,
        )


def key_group(pool_name: str) -> int:
    """The number of a pool in keys: 0 for KV, one made from its name for any other.

    Names come and go with SGLang's versions, so there is no table; two names with one number would still
    differ in the namespace.
    """
    if pool_name == KV:
        return 0
    return 1 + int.from_bytes(hashlib.sha256(pool_name.encode()).digest()[:4], "little") % ((1 << _GROUP_BITS) - 1)

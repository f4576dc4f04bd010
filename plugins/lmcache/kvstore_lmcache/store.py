"""Chunks of one size in one cache: every failure is a miss, a count and one line in the log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvstore import BlockStatus, KVCache, KVCacheKey, Presence
from kvstore.counting import Counting
from kvstore.errors import DeadlineError, KVStoreError
from kvstore_lmcache.names import ChunkName, batches, key_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvstore.lmcache")

_LOG_INTERVAL_S: Final = 60.0  # one line a minute tells that it goes on; the counters tell how often
_ROOM_WAIT_S: Final = 0.5  # a full write queue is emptied in steps of at most this, so that a put keeps its deadline


@dataclass(slots=True)
class StoreCounters:
    """What became of chunks.

    Attributes:
        stored: Can be found since they were put.
        loaded: Copied into the caller's memory, verified.
        missed: Asked for and not delivered.
        corrupt: Of those missed: found damaged or made for something else, and dropped.
        refused: Not stored: no room, no tier that took them, or an error.
        late: Not stored when the time of the put was over; they may be later.
        unfit: Not stored: of a shape that the configuration does not name.
        failed: Calls that ended with an error of the store.
    """

    stored: int = 0
    loaded: int = 0
    missed: int = 0
    corrupt: int = 0
    refused: int = 0
    late: int = 0
    unfit: int = 0
    failed: int = 0


class ChunkStore:
    """Chunks of one size; thread-safe.  Owns the cache that it is given.

    Calls block for at most the cache's deadline, puts for ``put_timeout_s``; none raises for what a
    medium does.

    Args:
        cache: An open cache whose blocks are chunks.
        salt: Isolates a tenant, besides the salts of the chunks.
        put_timeout_s: Longest time, in seconds, that one :meth:`put` waits.
        counters: Where to count; public for those who count what they make of it.
    """

    def __init__(
        self, cache: KVCache, *, salt: str | None, put_timeout_s: float, counters: Counting[StoreCounters]
    ) -> None:
        self.cache: Final = cache
        self._dtype: Final = cache.spec.torch_dtype()
        self._salt: Final = salt
        self._put_timeout_s: Final = put_timeout_s
        self.counters: Final = counters
        self._reads_unwritten: Final = cache.config.l1.enabled
        self._log_after = 0.0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.cache.spec.nbytes

    def contains(self, names: Sequence[ChunkName]) -> list[bool]:
        """Whether each chunk is there; what cannot be asked now is not."""
        found = [False] * len(names)
        for indices, key in self._keys(names):
            try:
                presences = self.cache.contains_each(key)
            except KVStoreError as e:
                self._failed("lookup", e)
                continue
            for i, presence in zip(indices, presences, strict=True):
                found[i] = presence is Presence.PRESENT
        return found

    def get(self, names: Sequence[ChunkName], out: Sequence[torch.Tensor]) -> list[bool]:
        """Copy each chunk that is there into its tensor; the others' tensors stay as they are.

        Args:
            names: Chunks, in any order.
            out: One contiguous ``uint8`` tensor of ``chunk_bytes`` elements for each.

        Returns:
            For each chunk, whether it was delivered; the caller counts that.
        """
        got = [False] * len(names)
        corrupt = 0
        for indices, key in self._keys(names):
            try:
                statuses = self.cache.get_each(key, [self._block(out[i]) for i in indices])
            except KVStoreError as e:
                self._failed("load", e)
                continue
            corrupt += sum(status in (BlockStatus.CORRUPT, BlockStatus.MISMATCH) for status in statuses)
            for i, status in zip(indices, statuses, strict=True):
                got[i] = status is BlockStatus.DELIVERED
        self.counters.add(corrupt=corrupt)
        return got

    def put(self, names: Sequence[ChunkName], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """Store chunks; they can be found when this returns, and the tensors are the caller's again.

        Args:
            names: Chunks, in any order.
            chunks: One contiguous ``uint8`` tensor of ``chunk_bytes`` elements for each.

        Returns:
            For each chunk, whether it can be found now.
        """
        if not names:
            return []
        until = time.monotonic() + self._put_timeout_s
        accepted = [False] * len(names)
        for indices, key in self._keys(names):
            try:
                done = self._put_run(key, [self._block(chunks[i]) for i in indices], until)
            except KVStoreError as e:
                self._failed("store", e)
                continue
            for i in indices[:done]:
                accepted[i] = True
        if self._reads_unwritten:
            self.counters.add(stored=sum(accepted), refused=len(names) - sum(accepted))
            return accepted
        return self._written(names, in_time=self._flush(until - time.monotonic()))

    def delete(self, names: Sequence[ChunkName]) -> int:
        """Delete chunks; returns how many were there."""
        deleted = 0
        for _, key in self._keys(names):
            try:
                deleted += self.cache.delete(key)
            except KVStoreError as e:
                self._failed("delete", e)
        return deleted

    def _block(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk.view(self._dtype).view(self.cache.spec.shape)

    def _keys(self, names: Sequence[ChunkName]) -> list[tuple[list[int], KVCacheKey]]:
        salted = [replace(name, salt=self._salt_of(name)) for name in names]
        block_tokens = self.cache.spec.block_tokens
        return [(indices, key_of([salted[i] for i in indices], block_tokens)) for indices in batches(salted)]

    def _salt_of(self, name: ChunkName) -> str | None:
        if self._salt is None and name.salt is None:
            return None
        return json.dumps([self._salt, name.salt], separators=(",", ":"))

    def _put_run(self, key: KVCacheKey, chunks: list[torch.Tensor], until: float) -> int:
        done = 0
        while True:
            done += self.cache.put(key.suffix(done), chunks[done:])
            left_s = until - time.monotonic()
            if done == len(chunks) or left_s <= 0:
                break
            self._flush(min(left_s, _ROOM_WAIT_S))  # what is queued makes room as it is written
        return done

    def _written(self, names: Sequence[ChunkName], *, in_time: bool) -> list[bool]:
        # Accepted is not stored: a full disk, a tier that is away or that admits only hot blocks.
        stored = self.contains(names)
        lost = len(names) - sum(stored)
        if in_time:
            self.counters.add(stored=sum(stored), refused=lost)
        else:
            self.counters.add(stored=sum(stored), late=lost)
        if lost:
            self._log(
                "%d of %d chunks were not stored within %gs; the tiers' counters and log lines tell why",
                lost,
                len(names),
                self._put_timeout_s,
            )
        return stored

    def _flush(self, timeout_s: float) -> bool:
        try:
            self.cache.flush(max(timeout_s, 0.0))
        except DeadlineError:
            return False
        except KVStoreError as e:
            self._failed("flush", e)
            return False
        return True

    def _failed(self, call: str, error: KVStoreError) -> None:
        self.counters.add(failed=1)
        self._log("%s failed, which counts as a miss: %s", call, error)

    def _log(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now >= self._log_after:
            self._log_after = now + _LOG_INTERVAL_S
            logger.warning(message, *values)

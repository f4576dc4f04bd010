"""Lookups for requests, off the scheduler's thread: one answer for all shards of a block."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore.cache import KVCache
from kvstore.keys import BlockHashKey
from kvstore_vllm.connector_keys import prompt_key

logger = logging.getLogger("kvstore.vllm")

# A lookup of a local medium takes microseconds and one of a remote medium waits for the network.
_THREADS: Final = 8


class Question:
    """How many blocks of one prompt are there, from ``start`` on; answered by other threads.

    Attributes:
        start: The first block that was asked for.
        end: The block behind the last one that every shard has; valid once :attr:`answered` is set.
        answered_at: Monotonic seconds.
    """

    __slots__ = ("_lock", "_open", "answered", "answered_at", "end", "start")

    def __init__(self, start: int, end: int, n_shards: int) -> None:
        self.start = start
        self.end = end
        self.answered = threading.Event()
        self.answered_at = 0.0
        self._open = n_shards
        self._lock = threading.Lock()

    def answer(self, n_blocks: int) -> bool:
        """Take one shard's answer; says whether it was the last one."""
        with self._lock:
            self.end = min(self.end, self.start + n_blocks)
            self._open -= 1
            if self._open:
                return False
        self.answered_at = time.monotonic()
        self.answered.set()
        return True


class ShardLookups:
    """Asks every shard for the leading blocks of a prompt.

    A block is there only if all ranks can load their part of it, so the answer is the smallest of the
    shards' answers.  :meth:`ask` returns at once; caches bound their answers by their own deadline.

    Args:
        caches: One open cache for each different shard.
        block_tokens: Tokens per block.
    """

    def __init__(self, caches: Sequence[KVCache], block_tokens: int) -> None:
        self._caches = tuple(caches)
        self._block_tokens = block_tokens
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-vllm-lookup")
        self._changed = threading.Condition()
        self._under_way = 0
        self._warned = False

    def ask(self, hashes: Sequence[bytes], start: int, salt: str | None) -> Question:
        """Begin to count the leading blocks of ``hashes[start:]``.

        Args:
            hashes: The prompt's hashes from its first block on; copied.
            start: The first block that is asked for.
            salt: Isolates a tenant.
        """
        question = Question(start, len(hashes), len(self._caches))
        with self._changed:
            self._under_way += 1
        self._pool.submit(self._begin, tuple(hashes), salt, question)
        return question

    def wait(self, timeout_s: float) -> None:
        """Wait until a question that is under way is answered; returns at once when there is none."""
        with self._changed:
            if self._under_way:
                self._changed.wait(timeout_s)

    def clear(self) -> bool:
        """Clear every shard's namespace in the store; False when a tier may not have been reached."""
        cleared = [_cleared(cache) for cache in self._caches]  # all of them, also when one fails
        return all(cleared)

    def close(self) -> None:
        """Answer nothing more; what is under way ends within its deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, hashes: tuple[bytes, ...], salt: str | None, question: Question) -> None:
        try:
            key = prompt_key(hashes, self._block_tokens, salt).suffix(question.start)
            for cache in self._caches[1:]:
                self._pool.submit(self._ask_one, cache, key, question)
        except Exception as e:  # noqa: BLE001 - a border: a lookup that fails is a miss
            self._say(e)
            for _ in self._caches:
                self._note(question, 0)
            return
        self._ask_one(self._caches[0], key, question)

    def _ask_one(self, cache: KVCache, key: BlockHashKey, question: Question) -> None:
        try:
            n_blocks = cache.lookup(key).blocks
        except Exception as e:  # noqa: BLE001 - a border: a lookup that fails is a miss
            self._say(e)
            n_blocks = 0
        self._note(question, n_blocks)

    def _note(self, question: Question, n_blocks: int) -> None:
        if question.answer(n_blocks):
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _say(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("a lookup failed and counts as a miss; further ones are not logged: %r", error)


def _cleared(cache: KVCache) -> bool:
    try:
        before = _troubles(cache)
        cache.clear()
        done = _troubles(cache) == before and len(cache.stats().tiers) == len(cache.config.l2)
    except Exception as e:  # noqa: BLE001 - a border: the caller goes on under another salt
        logger.warning("the store could not be cleared; the engine goes on under a salt of its own: %r", e)
        return False
    if not done:
        logger.warning("a tier of the store could not be cleared; the engine goes on under a salt of its own")
    return done


def _troubles(cache: KVCache) -> int:
    counters = [tier.counters for tier in cache.stats().tiers]
    return sum(c.io_errors + c.timeouts + c.rejected_by_breaker for c in counters)

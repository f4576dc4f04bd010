"""The parts of an open cache in one process, and the checks at its door."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.agreed_reads import AgreedReads
from kvstore.errors import CapacityError, ConfigError, DeadlineError, KeyMismatchError
from kvstore.explaining import Explanation
from kvstore.group import LOCAL_SHARE
from kvstore.keys import KVCacheKey
from kvstore.loads import Loads
from kvstore.prefetch import Prefetcher
from kvstore.reads import Reads
from kvstore.transfer import Transfer, Transfers
from kvstore.types import BlockStatus
from kvstore.writes import Writes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvstore.explain import BlockReport
    from kvstore.group import Agreement
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.reservation import Reservation
    from kvstore.stack import Stack
    from kvstore.stats import Health, Stats
    from kvstore.tensors import Rows


class Opened:
    """The parts of an open cache in this process; made anew in a forked child.

    Args:
        stack: L1, tiers and queues.
        agreement: With the other ranks of a group, if there is one.
    """

    def __init__(self, stack: Stack, agreement: Agreement | None = None) -> None:
        self.stack = stack
        self.writes = Writes(stack)
        self.loads = Loads(stack, self.writes.served, 1.0 if agreement is None else LOCAL_SHARE)
        self.prefetcher = Prefetcher(f"kvstore-prefetch-{stack.cache_id}")
        self.transfers = Transfers(f"kvstore-transfer-{stack.cache_id}")
        self._agreement = agreement
        alone = Reads(stack, self.loads)
        self.reads: Reads | AgreedReads = (
            alone if agreement is None else AgreedReads(stack, self.loads, alone, agreement)
        )

    def check(self, key: KVCacheKey) -> None:
        """Check that a key fits this cache.

        Raises:
            KeyMismatchError: It is no key, of another block size, or lacks the salt that the config asks for.
        """
        block_tokens = self.stack.identity.spec.block_tokens
        if not isinstance(key, KVCacheKey):
            msg = f"expected a KVCacheKey, got {type(key).__name__}; make one with KVCacheKey.from_tokens(...)"
            raise KeyMismatchError(msg)
        if key.block_tokens != block_tokens:
            msg = (
                f"the key has blocks of {key.block_tokens} tokens, this cache of {block_tokens}; "
                f"make it with block_tokens={block_tokens}, or coarsen() a finer one"
            )
            raise KeyMismatchError(msg)
        if self.stack.config.defaults.require_salt and key.salt is None:
            msg = "the key has no salt, and defaults.require_salt is true; make it with salt=... of its tenant"
            raise KeyMismatchError(msg)

    def l1(self, call: str) -> L1Cache:
        """L1, for a call that cannot do without.

        Raises:
            ConfigError: It is disabled.
        """
        if self.stack.l1 is None:
            msg = f"{call}() needs L1, and l1.enabled is false; enable it or use get() and put()"
            raise ConfigError(msg)
        return self.stack.l1

    def prefetch(self, key: KVCacheKey) -> Future[int]:
        """Load the available prefix into L1 in the background.

        Raises:
            ConfigError: L1 is disabled.
        """
        l1 = self.l1("prefetch")

        def load(cancelled: threading.Event) -> int:
            entries = self.loads.pin(key, cancelled)
            l1.unpin(entries)
            return len(entries)

        return self.prefetcher.submit(load)

    def allocate(self, key: KVCacheKey) -> Reservation:
        """Reserve writable L1 blocks.

        Raises:
            ConfigError: L1 is disabled.
            CapacityError: The key has more blocks than L1 has slots.
        """
        l1 = self.l1("allocate")
        if len(key) > l1.pool.n_slots:
            msg = (
                f"allocate() of {len(key)} blocks, but L1 has {l1.pool.n_slots} slots; "
                "split the key or raise l1.capacity"
            )
            raise CapacityError(msg)
        return self.writes.reserve(key, l1)

    def explain(self, key: KVCacheKey) -> list[BlockReport]:
        """Say for each block why it hits or misses; bounded like a read."""
        return Explanation(self.stack, key, self.loads.until()).reports()

    def submit_get(self, key: KVCacheKey, rows: Rows, *, each: bool) -> Transfer:
        """Get in the background.

        Raises:
            ConfigError: The ranks of a group read together, in the order of their calls.
        """
        reads = self.reads
        if not isinstance(reads, Reads):
            msg = "submit_get() runs beside other calls, but a cache with a group needs one order: use get()"
            raise ConfigError(msg)

        def get(cancelled: threading.Event) -> list[BlockStatus]:
            if each:
                return reads.get_each(key, rows, cancelled)
            n_blocks = reads.get(key, rows, cancelled)
            return [BlockStatus.DELIVERED] * n_blocks + [BlockStatus.ABSENT] * (len(key) - n_blocks)

        return self.transfers.submit(len(key), get)

    def flush(self, timeout_s: float | None) -> None:
        """Wait for the write queues.

        Raises:
            DeadlineError: Some tier did not get there in time.
        """
        late = self.stack.flush(timeout_s)
        if late:
            msg = f"flush() did not finish within {timeout_s} s in {', '.join(late)}; the writes go on, flush again"
            raise DeadlineError(msg)

    def stats(self) -> Stats:
        """Counters of every part."""
        stats = self.stack.stats()
        return stats if self._agreement is None else replace(stats, group=self._agreement.counters)

    def health(self) -> Health:
        """State of every part; without agreement nothing can serve."""
        health = self.stack.health()
        if self._agreement is None:
            return health
        group = self._agreement.health
        if group.state == "down":
            return replace(health, state="down", group=group)
        degraded = health.state == "ok" and group.state != "ok"
        return replace(health, state="degraded" if degraded else health.state, group=group)

    def close(self) -> None:
        """Write out what is queued and release everything."""
        self.transfers.close()
        self.prefetcher.close()
        self.stack.close()

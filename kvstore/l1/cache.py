"""L1: blocks in host memory, shared by every thread of the process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.errors import ClosedError
from kvstore.eviction import EvictionPolicy
from kvstore.l1.counters import L1Counters
from kvstore.l1.device_cache import DeviceCache
from kvstore.l1.entry import Entry
from kvstore.l1.holding import Held, Holding
from kvstore.l1.index import BlockId, BlockIndex
from kvstore.l1.pool import SlabPool
from kvstore.spec import BlockSpec


class L1Cache:
    """Blocks of one spec in host memory: a dict from digest to slot, pins and an eviction policy.

    Thread-safe.  One lock guards index, pins, policy and free slots, and no block is copied under
    it: callers copy into slots they reserved and out of entries they pinned.  A pinned entry's
    bytes never change and its slot is not reused; only unpinned blocks are evicted, and only when
    a slot is needed.  No call waits for a pin or a medium.  After a fork the child's copy raises
    ClosedError: the child opens an L1 of its own.

    Args:
        spec: Shape of every block.
        capacity_bytes: Hard total of the pool in bytes, header pages included.
        policy: Makes the policy when called with the pool's size in blocks.
        populate: Touch all memory now instead of at first use.

    Attributes:
        spec: As given.
        pool: The slots; copy through ``pool.payload(slot)``.
        reclaim: Set by whoever queues writes: ``reclaim(n)`` takes back up to ``n`` of the newest
            queued writes, unpins their entries and returns how many.  Called without the lock.
        before_eviction: Set by whoever keeps blocks that leave: called with the number of slots that
            are about to be taken, without the lock, so that it can pin and save some of the victims,
            and wait a moment for that.
        generation: Goes up with every :meth:`clear`.
        near: Copies of blocks on an accelerator, see :meth:`keep_near`.

    Raises:
        CapacityError: Not one block fits.
        ConfigError: The host does not allow the capacity.
    """

    def __init__(
        self,
        spec: BlockSpec,
        capacity_bytes: int,
        policy: Callable[[int], EvictionPolicy],
        *,
        populate: bool = False,
    ) -> None:
        self.spec = spec
        self.pool = SlabPool(spec.nbytes, capacity_bytes, populate=populate)
        self.reclaim: Callable[[int], int] | None = None
        self.before_eviction: Callable[[int], None] | None = None
        self.generation = 0
        self.near: DeviceCache | None = None
        self._index = BlockIndex(self.pool, policy(self.pool.n_slots))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._reclaimed_writes = 0
        self._reserve_failures = 0

    def leading(self, digests: Sequence[bytes], start: int = 0) -> int:
        """Count the resident blocks from ``digests[start]`` up to the first hole.

        Pins nothing and is no use for the policy, so the answer may be outdated when it arrives.
        """
        self._enter()
        resident = self._index.entries.__contains__  # one dict read needs no lock: the answer is advisory
        n_blocks = 0
        for present in map(resident, digests[start:] if start else digests):
            if not present:
                break
            n_blocks += 1
        return n_blocks

    def contains(self, digests: Sequence[bytes]) -> list[bool]:
        """Say for each block whether it is resident; advisory, pins nothing."""
        self._enter()
        return list(map(self._index.entries.__contains__, digests))

    def ancestors(self, digest: bytes) -> list[bytes]:
        """Return the resident blocks that lead without a hole to ``digest``, itself included, head first."""
        self._enter()
        find = self._index.entries.get  # single dict reads, as in leading()
        found: list[bytes] = []
        entry = find(digest)
        while entry is not None:
            found.append(entry.digest)
            entry = None if entry.parent is None else find(entry.parent)
        return found[::-1]

    def pin_leading(self, digests: Sequence[bytes]) -> list[Entry]:
        """Pin the resident blocks up to the first hole; give each pin back with :meth:`unpin`.

        Not a use for the policy: call :meth:`touch` once per request, after publishing what was
        missing, so that the head of the request ends up as its most recent block.
        """
        self._enter()
        find, pin = self._index.entries.get, self._index.pin
        pinned: list[Entry] = []
        with self._lock:
            for digest in digests:
                entry = find(digest)
                if entry is None:
                    break
                pin(entry)
                pinned.append(entry)
        return pinned

    def pin_each(self, digests: Sequence[bytes]) -> list[Entry | None]:
        """Pin every resident block; None stands for an absent one."""
        self._enter()
        with self._lock:
            entries = list(map(self._index.entries.get, digests))
            for entry in entries:
                if entry is not None:
                    self._index.pin(entry)
        return entries

    def pin(self, entries: Iterable[Entry]) -> None:
        """Add one pin to each entry; the caller holds a pin of it already.

        Raises:
            ValueError: An entry has left L1; its slot belongs to another block.
        """
        self._enter()
        with self._lock:
            for entry in entries:
                self._index.pin(entry)

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Give back one pin of each entry; does nothing in a forked child.

        Raises:
            ValueError: An entry has no pin left, which is a bug of the caller.
        """
        if os.getpid() != self._pid:
            return
        unpin = self._index.unpin
        with self._lock:
            for entry in entries:
                unpin(entry)

    def reserve(self, n_blocks: int, *, at_any_cost: bool = True) -> list[int]:
        """Take up to ``n_blocks`` slots, evicting unpinned blocks as the policy says.

        Returns fewer when pins hold the rest; the caller then keeps the head of its request.  The
        slots go to :meth:`publish` or :meth:`release_slots`.

        Args:
            n_blocks: Slots wanted.
            at_any_cost: Ask :attr:`reclaim` once before giving up: for new blocks, which are worth
                a queued write, and not for copies of what a tier keeps.
        """
        self._enter()
        wanted = min(n_blocks, self.pool.n_slots)
        if self.before_eviction is not None:
            self.before_eviction(wanted)
        with self._lock:
            slots = self._index.take_slots(wanted)
            starved = len(slots) < wanted and self._index.pinned > 0
        if starved and at_any_cost and self.reclaim is not None:
            slots = self._reserve_again(slots, wanted)
        if len(slots) < n_blocks:
            with self._lock:
                self._reserve_failures += 1
        return slots

    def release_slots(self, slots: Iterable[int]) -> None:
        """Give back reserved slots that will not be published; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._index.free_slots(slots)

    def publish(
        self, items: Sequence[BlockId], slots: Sequence[int], *, pins: int = 0, generation: int | None = None
    ) -> list[Entry]:
        """Make the blocks in ``slots`` resident, all at once.

        The slots belong to L1 from here on and their bytes must not change any more.  Where a block
        became resident meanwhile, its slot is freed and the resident entry returned.

        Args:
            items: Digest and parent of each block, in key order.
            slots: One reserved slot per item, with the block's bytes in it.
            pins: Pins that the caller gets on every returned entry.
            generation: Value of :attr:`generation` when the bytes were asked for.  If
                :meth:`clear` ran since, nothing becomes resident: the returned entries are dead,
                readable while pinned.

        Raises:
            ValueError: Not one slot per item; nothing happened.
        """
        self._enter()
        if len(items) != len(slots):
            msg = f"publish got {len(items)} blocks and {len(slots)} slots; expected one slot per block"
            raise ValueError(msg)
        pairs = zip(items, slots, strict=True)
        with self._lock:
            if generation is not None and generation != self.generation:
                return self._index.insert_dead(pairs, pins)
            return self._index.insert(pairs, pins)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note one use of those blocks that are resident; once per request, in key order."""
        self._enter()
        with self._lock:
            resident = self._index.entries
            self._index.policy.touch([digest for digest in digests if digest in resident])

    def delete(self, digests: Iterable[bytes]) -> int:
        """Remove blocks from the index at once; pinned bytes stay until their last unpin.

        Returns:
            How many were resident.
        """
        self._enter()
        with self._lock:
            return sum(map(self._index.remove, digests))

    def clear(self) -> list[bytes]:
        """Remove every block like :meth:`delete`, and start a new generation.

        Returns:
            Digests of what was resident, and of the remembered evicted blocks, which are forgotten.
        """
        self._enter()
        with self._lock:
            index = self._index
            digests = [*(index.evicted or ()), *index.entries]
            if index.evicted is not None:
                index.evicted.clear()
            index.clear()
            self.generation += 1
        return digests

    def room(self) -> tuple[int, int]:
        """Return the free slots, and the blocks evicted since open."""
        with self._lock:
            return self.pool.n_free, self._index.evictions

    def pin_victims(self, choose: Callable[[Iterator[Entry]], list[Entry]]) -> list[Entry]:
        """Pin some of the blocks that leave next; give each pin back with :meth:`unpin`.

        Args:
            choose: Gets the resident entries, pinned ones included, the next victim first, and returns
                those to be pinned.  Runs under the lock, so it must be quick and call nothing of L1.
        """
        self._enter()
        with self._lock:
            return self._index.pin_victims(choose)

    def watch_evictions(self, on_evicted: Callable[[Entry], None]) -> None:
        """Call ``on_evicted`` with every block that is evicted, under the lock: it must be quick."""
        with self._lock:
            self._index.on_evicted = on_evicted

    def keep_near(self, cache: DeviceCache) -> None:
        """Use a pool of device copies: told of every block that leaves, and closed with this L1."""
        with self._lock:
            self.near = cache
            self._index.on_gone = cache.forget

    def keep_evicted(self, n_blocks: int) -> None:
        """Remember the digests of the last ``n_blocks`` evicted blocks for :meth:`drain_evicted`."""
        with self._lock:
            self._index.evicted = deque(maxlen=n_blocks)

    def evicted_lately(self, digests: Sequence[bytes], *, forget: bool = False) -> set[bytes]:
        """Which of these blocks are among the remembered evicted ones; may forget them. Looks through all of those."""
        with self._lock:
            remembered = self._index.evicted or ()
            found = set(digests).intersection(remembered)
            if found and forget:
                kept = [digest for digest in remembered if digest not in found]
                self._index.evicted = deque(kept, maxlen=self._index.evicted.maxlen) if self._index.evicted else None
        return found

    def drain_evicted(self) -> list[bytes]:
        """Return and forget the remembered digests, oldest first; their bytes are gone."""
        self._enter()
        with self._lock:
            remembered = self._index.evicted
            digests = list(remembered or ())
            if remembered:
                remembered.clear()
        return digests

    @property
    def counters(self) -> L1Counters:
        """A consistent snapshot; works on a closed cache too, but not after a fork."""
        self._check_process()
        index, block_bytes = self._index, self.spec.nbytes
        with self._lock:
            index.drain()
            return L1Counters(
                capacity_blocks=self.pool.n_slots,
                resident_blocks=len(index.entries),
                resident_bytes=len(index.entries) * block_bytes,
                pinned_blocks=index.pinned,
                orphaned_bytes=index.lineage.orphans * block_bytes,
                evictions=index.evictions,
                leases_dropped=index.leases_dropped,
                reclaimed_writes=self._reclaimed_writes,
                reserve_failures=self._reserve_failures,
                pinned_host_bytes=self.pool.pinned_bytes,
                pin_refusals=self.pool.pin_refusals,
                **({} if self.near is None else self.near.gauges()),
            )

    def hold(self, items: Sequence[Held]) -> Holding:
        """Wrap pins or slots of the caller, so that a finalizer can give them back."""
        return Holding(items, self._index.dropped)

    def claim(self, holding: Holding) -> list[Held]:
        """Take pins or slots out of a holding; empty if it was released before."""
        self._enter()
        with self._lock:
            return self._index.claim(holding)

    def tidy(self) -> None:
        """Take back what dropped and released holdings had.

        Safe in finalizers: it never waits, and while another call holds the lock it leaves the
        work to the next one.
        """
        if self._index.dropped and os.getpid() == self._pid and self._lock.acquire(blocking=False):
            try:
                self._index.drain()
            finally:
                self._lock.release()

    def check_open(self) -> None:
        """Check that this L1 can be used.

        Raises:
            ClosedError: It was closed, or came over a fork.
        """
        self._check_process()
        if self._closed:
            msg = "the L1 cache is closed; open a cache again to use it"
            raise ClosedError(msg)

    def close(self) -> None:
        """Forget every block and give the memory back once no lease looks at it; idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._index.clear()
        self.pool.close()
        if self.near is not None:
            self.near.close()

    def _enter(self) -> None:
        self.check_open()
        if self._index.dropped:
            self.tidy()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            msg = f"this L1 belongs to process {self._pid} and came over a fork; open a cache in the child"
            raise ClosedError(msg)

    def _reserve_again(self, slots: list[int], wanted: int) -> list[int]:
        """Retry once after asking for queued writes back; keeps or frees ``slots`` on an error."""
        try:
            reclaimed = self.reclaim(wanted - len(slots)) if self.reclaim is not None else 0
            with self._lock:
                self._reclaimed_writes += reclaimed
                return slots + self._index.take_slots(wanted - len(slots))
        except BaseException:
            self.release_slots(slots)
            raise

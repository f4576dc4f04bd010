"""The cache: one object in front of L1 and any number of L2 tiers."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvstore.agreed_reads import chunk_blocks
from kvstore.config import Config, load_config
from kvstore.errors import ClosedError
from kvstore.events import CacheInfo
from kvstore.group import Agreement
from kvstore.keys import KVCacheKey
from kvstore.l1.lease import Lease
from kvstore.l2.shelf import Coding
from kvstore.namespace import Namespace, cautions
from kvstore.opened import Opened
from kvstore.plugins import Registry
from kvstore.served import L1
from kvstore.spec import BlockSpec
from kvstore.stack import Identity, Stack
from kvstore.stream import LayerGroup
from kvstore.tensors import Blocks, rows_of
from kvstore.watch import unwatch, watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kvstore.explain import BlockReport
    from kvstore.l1.reservation import Reservation
    from kvstore.results import Lookup
    from kvstore.stats import Health, Stats
    from kvstore.transfer import Transfer
    from kvstore.types import BlockStatus, Presence

logger = logging.getLogger("kvstore.cache")

_numbers: Final = itertools.count(1)


class KVCache:
    """Keeps KV blocks in tiers and gives them back bit for bit, or not at all.

    Make one with :meth:`open`; close it, or use it as a context manager.  Every method may be
    called from any thread.  In a forked child the cache starts cold: with an empty L1 and the same
    tiers, opened anew at the first call.

    A miss is a count, never an exception.  Data calls raise for misuse only: ``KeyMismatchError``,
    ``SpecMismatchError``, ``ClosedError``, ``CapacityError``; what a medium does wrong becomes a
    miss or a refused put, a counter and a health state.

    With a ``group`` the reads (lookup, get, contains_each, get_each, acquire, stream) give every rank
    the same answer: what all of them have.  The ranks make these calls in the same order.
    """

    def __init__(
        self, config: Config, identity: Identity, registry: Registry, agreement: Agreement | None = None
    ) -> None:
        """Use :meth:`open`."""
        self._config = config
        self._identity = identity
        self._registry = registry
        self._cache_id = f"cache-{os.getpid()}-{next(_numbers)}"
        self._lock = threading.Lock()
        self._closed = False
        self._agreement = agreement
        self._state: Opened | None = self._make()

    @classmethod
    def open(
        cls,
        config: Config | Mapping[str, Any] | str | PathLike[str],
        *,
        spec: BlockSpec,
        namespace: Namespace,
        registry: Registry | None = None,
        group: ProcessGroup | None = None,
    ) -> KVCache:
        """Open a cache.

        Args:
            config: A TOML file's path, a mapping of the same form, or a :class:`Config`.
            spec: Shape and dtype of the blocks.
            namespace: Whose KV this is: model, revision and all that changes what the bytes mean.
            registry: Plugins to choose from; by default those that are installed.
            group: Ranks of a tensor-parallel group (``torch.distributed``), each with blocks of its own
                heads, that must get the same answers.  Every rank of it opens a cache at about the same time.

        Raises:
            ConfigError: A setting is wrong; the message names file, key path, value and expectation.
            PluginError: A selected plugin is missing, broken, in conflict or incompatible.
            BackendError: A required tier cannot be opened, or another rank could not open its cache.
            CapacityError: L1 cannot hold a single block.
            DeadlineError: Another rank of the group did not come within a minute.
        """
        agreement = None if group is None else Agreement.join(group)
        make = functools.partial(cls._open, config, spec, namespace, registry, agreement)
        if agreement is None:
            return make()
        same = f"{namespace.model!r}, revision {namespace.revision!r}, blocks of {spec.block_tokens} tokens"
        return agreement.together(same, chunk_blocks(spec.nbytes), make)

    @classmethod
    def _open(
        cls,
        config: Config | Mapping[str, Any] | str | PathLike[str],
        spec: BlockSpec,
        namespace: Namespace,
        registry: Registry | None,
        agreement: Agreement | None,
    ) -> KVCache:
        registry = registry if registry is not None else Registry.discover()
        loaded = load_config(config, registry)
        identity = Identity(spec, namespace, namespace.digest(spec), Coding.of(loaded))
        for caution in cautions(namespace):
            logger.warning(caution)
        cache = cls(loaded, identity, registry, agreement)
        watch(cache, KVCache._forked)
        tiers = ([L1] if loaded.l1.enabled else []) + [tier.name for tier in loaded.l2]
        registry.cache_opened(
            CacheInfo(cache.cache_id, identity.digest.hex(), tuple(tiers), spec.block_tokens, spec.nbytes)
        )
        return cache

    # -- what it is

    @property
    def cache_id(self) -> str:
        """Unique within the process; labels events and stats."""
        return self._cache_id

    @property
    def spec(self) -> BlockSpec:
        """Shape and dtype of the blocks."""
        return self._identity.spec

    @property
    def namespace(self) -> Namespace:
        """Whose KV this is."""
        return self._identity.namespace

    @property
    def config(self) -> Config:
        """The effective configuration."""
        return self._config

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<KVCache {self._cache_id} {state}, namespace {self._identity.digest.hex()[:12]}>"

    # -- reads

    def lookup(self, key: KVCacheKey) -> Lookup:
        """Say how many leading blocks of ``key`` are present, and in which tiers.

        Advisory: nothing is moved or pinned and no recency changes; a block may be evicted before
        the next call.  Costs about a microsecond per block.
        """
        return self._use(key).reads.lookup(key)

    def get(self, key: KVCacheKey, out: Blocks) -> int:
        """Copy the longest available prefix of ``key`` into ``out``.

        Args:
            key: The wanted blocks.
            out: Tensor ``(len(key), *spec.shape)`` of ``spec.dtype``, or a sequence of
                ``len(key)`` tensors of ``spec.shape``.

        Returns:
            Blocks delivered; ``out`` is untouched behind them.  Every one was verified.
        """
        state = self._use(key)
        return state.reads.get(key, rows_of(out, self.spec, len(key), argument="out", writable=True))

    def contains_each(self, key: KVCacheKey) -> list[Presence]:
        """Say for each block on its own whether it is present; UNKNOWN when a tier is down."""
        return self._use(key).reads.contains_each(key)

    def get_each(self, key: KVCacheKey, out: Blocks) -> list[BlockStatus]:
        """Copy every available block of ``key`` into its place in ``out``, holes or not.

        Returns:
            One status per block; only ``DELIVERED`` ones have changed in ``out``.
        """
        state = self._use(key)
        return state.reads.get_each(key, rows_of(out, self.spec, len(key), argument="out", writable=True))

    def submit_get(self, key: KVCacheKey, out: Blocks, *, each: bool = False) -> Transfer:
        """Start a :meth:`get`, or with ``each`` a :meth:`get_each`, and return at once.

        The transfer borrows ``out`` until it has ended; closing the cache cancels it.  On an
        accelerator, the stream that is current now is the one that its work is ordered with.

        Raises:
            ConfigError: The cache has a ``group``.
        """
        state = self._use(key)
        rows = rows_of(out, self.spec, len(key), argument="out", writable=True)
        return state.submit_get(key, rows, each=each)

    def acquire(self, key: KVCacheKey) -> Lease:
        """Pin the longest available prefix in L1 and give zero-copy access to it.

        Blocks that are only in L2 are loaded first.  The lease may hold fewer blocks than
        ``lookup`` said, and none when everything else in L1 is pinned.

        Raises:
            ConfigError: L1 is disabled, so there is nothing to pin.
        """
        state = self._use(key)
        l1 = state.l1("acquire")
        return Lease(l1, state.reads.pin(key))

    def prefetch(self, key: KVCacheKey) -> Future[int]:
        """Load the available prefix of ``key`` into L1 in the background.

        Returns:
            A future of the number of leading blocks that are in L1 then.  Cancelling it works at
            any time; what was loaded by then stays.

        Raises:
            ConfigError: L1 is disabled.
        """
        return self._use(key).prefetch(key)

    def stream(self, key: KVCacheKey) -> Iterator[LayerGroup]:
        """Yield the layers of the longest available prefix in order, later ones being read meanwhile.

        Each group is in memory of its own and was verified.  A damaged or vanished part of a record
        shortens the prefix from its group on, so the last group's ``n_blocks`` is what counts.
        Close the iterator (or exhaust it) to let go of what it pins.
        """
        return self._use(key).reads.stream(key)

    # -- writes

    def put(self, key: KVCacheKey, blocks: Blocks) -> int:
        """Store blocks; they are snapshotted before the call returns and written in the background.

        Args:
            key: Names of the blocks.
            blocks: Tensor ``(len(key), *spec.shape)`` of ``spec.dtype``, or a sequence of
                ``len(key)`` tensors of ``spec.shape``; any strides, any device.

        Returns:
            Leading blocks accepted: all of them unless L1 is full of pinned blocks (or, without
            L1, the write queues are full).  A tier whose queue is full refuses the rest and counts
            it; :meth:`flush` waits for the others.
        """
        state = self._use(key)
        return state.writes.put(key, rows_of(blocks, self.spec, len(key), argument="blocks"))

    def allocate(self, key: KVCacheKey) -> Reservation:
        """Reserve writable L1 blocks for ``key``, to be filled in place.

        ``with cache.allocate(key) as r:`` fill ``r.tensors[i]``, then ``r.commit()`` publishes and
        queues them; leaving the block without it discards them.  The reservation may be shorter
        than the key when L1 is full of pinned blocks.

        Raises:
            ConfigError: L1 is disabled.
            CapacityError: The key has more blocks than L1 has slots.
        """
        return self._use(key).allocate(key)

    def delete(self, key: KVCacheKey) -> int:
        """Delete the blocks of ``key`` from every tier; returns how many were present.

        A queued write of one of them is dropped, one under way is waited for (bounded by the
        tier's deadline).
        """
        return self._use(key).writes.delete(key)

    def clear(self) -> None:
        """Forget every block of this namespace, in all tiers and for all processes, at once.

        Each tier starts a new random epoch; space is reclaimed in the background.  Other processes
        follow at their next access to a tier.
        """
        self._use().writes.clear()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every put accepted before the call is stored, refused or dropped (counted).

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            DeadlineError: Some tier did not get there in time; the writes go on.
        """
        self._use().flush(timeout)

    def note_prefill(self, tokens: int, seconds: float, *, context_tokens: int = 0) -> None:
        """Say how long the engine took to compute tokens, so that loads slower than that are declined.

        Cheap; what makes no sense is ignored.  Connectors call it; see ``[gate]`` of the config.

        Args:
            tokens: Tokens of one forward pass of a prefill, above 0.
            seconds: What it took, without the time to load or store anything.
            context_tokens: Tokens of the prompt before them.
        """
        self._use().stack.gate.note_prefill(tokens, seconds, context_tokens)

    # -- state

    def explain(self, key: KVCacheKey) -> list[BlockReport]:
        """Say for each block and tier why a read would find it there or miss it, and what to do.

        For people and tools: reads records to verify them, within the deadline, and changes nothing.  A cache
        with a ``group`` explains its own rank.
        """
        return self._use(key).explain(key)

    def stats(self) -> Stats:
        """Counters of the cache, of L1 and of every tier."""
        return self._use().stats()

    def health(self) -> Health:
        """State of every tier, judged by what its operations did."""
        return self._use().health()

    def close(self) -> None:
        """Write out what is queued, release everything; takes at most about 5 s.

        Idempotent.  Leases stay readable until they are released.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            state, self._state = self._state, None
        unwatch(self)
        if self._agreement is not None:
            self._agreement.close()
        if state is not None:
            state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- inner matters

    def _make(self) -> Opened:
        return Opened(Stack(self._cache_id, self._config, self._identity, self._registry), self._agreement)

    def _use(self, key: KVCacheKey | None = None) -> Opened:
        """The open parts, after checking that cache and key fit the call."""
        state = self._state
        if state is None:
            state = self._reopen()
        if key is not None:
            state.check(key)
        return state

    def _reopen(self) -> Opened:
        with self._lock:
            if self._closed:
                msg = f"{self._cache_id} is closed; open a cache again with KVCache.open()"
                raise ClosedError(msg)
            if self._state is None:  # in a forked child
                self._state = self._make()
            return self._state

    def _forked(self) -> None:
        """Start cold in a child: nothing of the parent's threads, locks or connections is used."""
        self._lock = threading.Lock()
        self._cache_id = f"cache-{os.getpid()}-{next(_numbers)}"
        self._state = None
        if self._agreement is not None:
            self._agreement.forked()

"""AIBrix's cache over a kvstore cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from kvstore.compat.aibrix.addressing import Addressed, address
from kvstore.compat.aibrix.arguments import Arguments
from kvstore.compat.aibrix.handles import KVCacheHandle, MemoryRegionKVCacheHandle
from kvstore.compat.aibrix.interface import CacheInterface
from kvstore.compat.aibrix.metrics import KVCacheMetrics
from kvstore.compat.aibrix.regions import Hold, ManagedMemoryRegion
from kvstore.compat.aibrix.settings import open_store
from kvstore.compat.aibrix.spec import KVCacheConfig
from kvstore.compat.aibrix.status import Status, StatusCodes
from kvstore.errors import DeadlineError

if TYPE_CHECKING:
    from kvstore import KVCacheKey, Reservation

_FLUSH_S: Final = 60.0  # as AIBrix waits

_PROBE_BLOCKS: Final = 8
"""Blocks of a long query that are asked for first: hashing 8 costs about as much as the call itself,
hashing 4,096 takes 4 ms, and a query that misses usually misses at its head."""


class AibrixCache(CacheInterface):
    """The cache that AIBrix calls its base manager; every method may be called from any thread.

    Args:
        config: Shape of the blocks.  Which store is behind them is said by ``configure`` or the
            environment.

    Raises:
        ConfigError: A setting is wrong; it names the setting and the value.
        BackendError: A required tier cannot be opened.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        super().__init__(config)
        self._settings = open_store(config.block_spec)
        self._store = self._settings.cache
        self._metrics = KVCacheMetrics(measures_time=self._settings.measures_time)
        l1 = self._store.stats().l1
        self._l1_blocks = 0 if l1 is None else l1.capacity_blocks

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk, from ``AIBRIX_KV_CACHE_OL_CHUNK_SIZE``."""
        return self._settings.chunk_tokens

    @property
    def metrics(self) -> KVCacheMetrics:
        """Counters of the calls."""
        return self._metrics

    # -- reads

    def _exists(self, arguments: Arguments) -> Status[int]:
        wanted = self._address(arguments)
        n_blocks = 0
        if wanted.n_blocks > 8 * _PROBE_BLOCKS and wanted.hashed < _PROBE_BLOCKS:
            n_blocks = self._store.lookup(wanted.key(_PROBE_BLOCKS)).blocks
            if n_blocks < _PROBE_BLOCKS:
                return self._tokens(n_blocks)
        return self._tokens(self._store.lookup(wanted.key()).blocks if wanted.n_blocks else 0)

    def _acquire(self, arguments: Arguments) -> Status[tuple[int, KVCacheHandle]]:
        wanted = self._address(arguments)
        handle = self._pin(wanted.key()) if wanted.n_blocks else None
        if handle is None:
            return Status(StatusCodes.NOT_FOUND)
        return Status.ok((len(handle) * self.block_ntokens, handle))

    def _get(self, arguments: Arguments) -> Status[int]:
        return self._tokens(self._copy_out(arguments))

    def _copy_out(self, arguments: Arguments) -> int:
        """Fill the caller's handle; the number of blocks."""
        wanted, handle = self._address(arguments), arguments.handle
        if handle is None or not wanted.n_blocks:
            return 0
        if any(isinstance(region, ManagedMemoryRegion) and region.hold.shared for region in handle.memory_regions):
            msg = "kv_tensors are blocks of the store, which nobody may write to; use allocate_for() or your own memory"
            raise ValueError(msg)
        n_blocks = min(len(handle), wanted.n_blocks)
        return self._store.get(wanted.key(n_blocks), list(handle.to_tensors()[:n_blocks]))

    def _pin(self, key: KVCacheKey) -> KVCacheHandle | None:
        """A handle over the stored leading blocks of ``key``, None for none."""
        if self._l1_blocks:
            lease = self._store.acquire(key)
            hold = Hold(lambda: lease.tensors, lease.release, shared=True)
            return self._handle(hold, lease.blocks)
        n_blocks = self._store.lookup(key).blocks
        memory = self._memory(n_blocks)
        n_blocks = self._store.get(key.prefix(n_blocks), memory) if n_blocks else 0
        return self._handle(Hold(lambda: memory, lambda: None, shared=False), n_blocks)

    # -- writes

    def _allocate(self, arguments: Arguments) -> Status[KVCacheHandle]:
        wanted = self._address(arguments)
        handle: KVCacheHandle | None
        if self._l1_blocks:
            key = wanted.key(self._l1_blocks)
            handle = self._reserve(key) if wanted.n_blocks else None
        else:
            memory = self._memory(wanted.n_blocks)
            handle = self._handle(Hold(lambda: memory, lambda: None, shared=False), wanted.n_blocks)
        if handle is None:
            return Status(StatusCodes.OUT_OF_MEMORY if wanted.n_blocks else StatusCodes.INVALID)
        return Status.ok(handle)

    def _reserve(self, key: KVCacheKey) -> KVCacheHandle | None:
        reservation = self._store.allocate(key)
        return self._handle(_Reserved(reservation, key), reservation.blocks)

    def _put(self, arguments: Arguments) -> Status[int]:
        handle = arguments.handle
        if handle is None:
            return Status(StatusCodes.INVALID)
        try:
            return self._put_blocks(arguments, handle)
        finally:
            handle.release()

    def _put_blocks(self, arguments: Arguments, handle: KVCacheHandle) -> Status[int]:
        query, bound = arguments.query, self._settings.max_sequence_tokens
        n_before = 0 if arguments.prefix is None else len(arguments.prefix)
        if bound is not None and n_before + len(query) > bound:
            if n_before >= bound:
                return Status(StatusCodes.DENIED, f"the sequence is longer than {bound} tokens")
            query = query[: (bound - n_before) // self.block_ntokens * self.block_ntokens]
            handle.truncate(len(query) // self.block_ntokens)
        if len(query) != len(handle) * self.block_ntokens:
            n_tokens = len(handle) * self.block_ntokens
            return Status(StatusCodes.INVALID, f"the query has {len(query)} tokens, the handle's blocks {n_tokens}")
        key = self._address(Arguments(arguments.prefix, query)).key()
        reserved = _reserved_for(key, handle)
        n_blocks = self._store.put(key, handle.to_tensors()) if reserved is None else reserved.commit(len(handle))
        return Status.ok(n_blocks * self.block_ntokens)

    def _delete(self, arguments: Arguments) -> Status[Any]:
        wanted = self._address(arguments)
        if wanted.n_blocks:
            self._store.delete(wanted.key())
        return Status.ok()

    # -- the rest

    def _prefetch(self, arguments: Arguments) -> Status[Any]:
        wanted = self._address(arguments)
        if wanted.n_blocks and self._l1_blocks:
            self._store.prefetch(wanted.key())
        return Status.ok()

    def flush(self) -> Status[Any]:
        """Wait until what was put is stored; TIMEOUT after 60 s."""
        try:
            self._store.flush(_FLUSH_S)
        except DeadlineError as e:
            return Status(StatusCodes.TIMEOUT, e)
        return Status.ok()

    def close(self) -> None:
        """Write out what waits, release everything; takes at most about 5 s."""
        self._store.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    # -- inner matters

    def _address(self, arguments: Arguments) -> Addressed:
        return address(arguments.prefix, arguments.query, self.block_ntokens, chained=self._settings.chained)

    def _tokens(self, n_blocks: int) -> Status[int]:
        return Status.ok(n_blocks * self.block_ntokens) if n_blocks else Status(StatusCodes.NOT_FOUND)

    def _memory(self, n_blocks: int) -> Sequence[torch.Tensor]:
        return torch.empty((n_blocks, *self.block_shape), dtype=self.block_dtype).unbind(0)

    def _handle(self, hold: Hold, n_blocks: int) -> KVCacheHandle | None:
        if not n_blocks:
            return None
        return MemoryRegionKVCacheHandle(self.block_dtype, self.block_shape, hold.regions(n_blocks, self.block_nbytes))


class _Reserved(Hold):
    """Reserved slots of L1, which become the blocks of ``key`` without a copy."""

    def __init__(self, reservation: Reservation, key: KVCacheKey) -> None:
        super().__init__(lambda: reservation.tensors, reservation.release, shared=False)
        self.key = key
        self.commit = reservation.commit


def _reserved_for(key: KVCacheKey, handle: KVCacheHandle) -> _Reserved | None:
    """The reservation behind a handle, if it was made for ``key`` and nobody else holds a part of it."""
    regions = handle.memory_regions
    hold = getattr(regions[0], "hold", None) if regions else None
    if not isinstance(hold, _Reserved) or hold.key.digests[: len(regions)] != key.digests:
        return None
    own = all(
        isinstance(region, ManagedMemoryRegion)
        and region.hold is hold
        and region.position == position
        and region.ref_count == 1
        for position, region in enumerate(regions)
    )
    return hold if own else None

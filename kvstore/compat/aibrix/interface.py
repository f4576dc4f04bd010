"""What engines call: typed forms of every call, brought into one form and counted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, overload

from kvstore.compat.aibrix.arguments import Arguments, normalise
from kvstore.compat.aibrix.handles import KVCacheHandle
from kvstore.compat.aibrix.metrics import KVCacheMetrics, Operation
from kvstore.compat.aibrix.spec import KVCacheConfig, KVCacheFeature
from kvstore.compat.aibrix.status import Status, StatusCodes
from kvstore.compat.aibrix.views import BlockHashes, KVCacheKey, KVCacheKeyTypes, TokenListView
from kvstore.errors import KeyMismatchError, SpecMismatchError

if TYPE_CHECKING:
    import torch


class CacheInterface(ABC):
    """AIBrix's cache as callers see it; :class:`~kvstore.compat.aibrix.cache.AibrixCache` is the one there is.

    Every data call takes ``(prefix, query)`` or ``(cache_key)``, then ``kv_tensors`` if it needs a
    handle, by position or by name.  A call that is made in another way raises ``TypeError``;
    arguments that make no sense together give the status INVALID.

    Args:
        config: Shape of the blocks.

    Attributes:
        config: As given; the other attributes repeat parts of it.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.block_spec = config.block_spec
        self.block_layout = config.block_spec.block_layout
        self.block_shape = config.block_spec.block_shape
        self.block_dtype = config.block_spec.block_dtype
        self.block_ntokens = config.block_spec.block_ntokens
        self.block_nbytes = config.block_spec.block_nbytes
        self.block_shape_token_dim = config.block_spec.block_shape_token_dim

    @property
    def feature(self) -> KVCacheFeature:
        """GPUDirect support: none."""
        return KVCacheFeature()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.block_ntokens

    @property
    @abstractmethod
    def chunk_size(self) -> int:
        """Tokens per chunk of :meth:`cache_chunk_keys`, whole blocks."""

    @property
    @abstractmethod
    def metrics(self) -> KVCacheMetrics:
        """Counters of the calls."""

    # -- reads

    @overload
    def exists(self, prefix: TokenListView | None, query: TokenListView) -> Status[int]: ...
    @overload
    def exists(self, prefix: BlockHashes | None, query: BlockHashes) -> Status[int]: ...
    @overload
    def exists(self, cache_key: KVCacheKey) -> Status[int]: ...
    def exists(self, *args: Any, **kwargs: Any) -> Status[int]:
        """Say how many leading tokens of the query are stored; NOT_FOUND for none.  Moves nothing."""
        return self._counted(Operation.EXISTS, self._exists, normalise(args, kwargs))

    @overload
    def acquire(self, prefix: TokenListView | None, query: TokenListView) -> Status[tuple[int, KVCacheHandle]]: ...
    @overload
    def acquire(self, prefix: BlockHashes | None, query: BlockHashes) -> Status[tuple[int, KVCacheHandle]]: ...
    @overload
    def acquire(self, cache_key: KVCacheKey) -> Status[tuple[int, KVCacheHandle]]: ...
    def acquire(self, *args: Any, **kwargs: Any) -> Status[tuple[int, KVCacheHandle]]:
        """Pin the leading stored blocks: their tokens and a handle to be released, or NOT_FOUND."""
        return self._counted(Operation.ACQUIRE, self._acquire, normalise(args, kwargs))

    @overload
    def get(self, prefix: TokenListView | None, query: TokenListView, kv_tensors: KVCacheHandle) -> Status[int]: ...
    @overload
    def get(self, prefix: BlockHashes | None, query: BlockHashes, kv_tensors: KVCacheHandle) -> Status[int]: ...
    @overload
    def get(self, cache_key: KVCacheKey, kv_tensors: KVCacheHandle) -> Status[int]: ...
    def get(self, *args: Any, **kwargs: Any) -> Status[int]:
        """Copy the leading stored blocks into the caller's handle, as many as it has; their tokens.

        What lies behind them is untouched.  The handle stays the caller's.
        """
        return self._counted(Operation.GET, self._get, normalise(args, kwargs, takes_handle=True))

    @overload
    def prefetch(self, prefix: TokenListView | None, query: TokenListView) -> None: ...
    @overload
    def prefetch(self, prefix: BlockHashes | None, query: BlockHashes) -> None: ...
    @overload
    def prefetch(self, cache_key: KVCacheKey) -> None: ...
    def prefetch(self, *args: Any, **kwargs: Any) -> None:
        """Load the query's leading blocks into L1 in the background."""
        _answered(self._prefetch, normalise(args, kwargs))

    # -- writes

    @overload
    def allocate_for(self, prefix: TokenListView | None, query: TokenListView) -> Status[KVCacheHandle]: ...
    @overload
    def allocate_for(self, prefix: BlockHashes | None, query: BlockHashes) -> Status[KVCacheHandle]: ...
    @overload
    def allocate_for(self, cache_key: KVCacheKey) -> Status[KVCacheHandle]: ...
    def allocate_for(self, *args: Any, **kwargs: Any) -> Status[KVCacheHandle]:
        """Reserve memory for the query's blocks, to be filled and put, or released.

        The handle has fewer blocks when L1 has no room for all; OUT_OF_MEMORY when for none.
        """
        return self._counted(Operation.ALLOCATE, self._allocate, normalise(args, kwargs))

    @overload
    def put(self, prefix: TokenListView | None, query: TokenListView, kv_tensors: KVCacheHandle) -> Status[int]: ...
    @overload
    def put(self, prefix: BlockHashes | None, query: BlockHashes, kv_tensors: KVCacheHandle) -> Status[int]: ...
    @overload
    def put(self, cache_key: KVCacheKey, kv_tensors: KVCacheHandle) -> Status[int]: ...
    def put(self, *args: Any, **kwargs: Any) -> Status[int]:
        """Store a handle's blocks, one for each block of the query; the tokens accepted.

        Takes the caller's references over, however it ends: release a handle, or put it.
        """
        return self._counted(Operation.PUT, self._put, normalise(args, kwargs, takes_handle=True))

    @overload
    def delete(self, prefix: TokenListView | None, query: TokenListView) -> Status[Any]: ...
    @overload
    def delete(self, prefix: BlockHashes | None, query: BlockHashes) -> Status[Any]: ...
    @overload
    def delete(self, cache_key: KVCacheKey) -> Status[Any]: ...
    def delete(self, *args: Any, **kwargs: Any) -> Status[Any]:
        """Delete the query's blocks everywhere; handles stay readable.  OK also when there were none."""
        return _answered(self._delete, normalise(args, kwargs))

    # -- the rest

    @overload
    def cache_chunk_keys(
        self, prefix: TokenListView | None, query: TokenListView
    ) -> Iterator[tuple[TokenListView, TokenListView, TokenListView | None, TokenListView]]: ...
    @overload
    def cache_chunk_keys(
        self, prefix: BlockHashes | None, query: BlockHashes
    ) -> Iterator[tuple[BlockHashes, BlockHashes, BlockHashes | None, BlockHashes]]: ...
    def cache_chunk_keys(self, prefix: KVCacheKeyTypes | None, query: KVCacheKeyTypes) -> Iterator[tuple[Any, ...]]:
        """Cut a query into chunks of :attr:`chunk_size`.

        Yields:
            What precedes the chunk, the chunk, the next chunk or None, and the whole sequence.  An
            incomplete block at the end is in the last chunk.
        """
        whole: Any = query if prefix is None else prefix + query
        first = len(whole) - len(query)
        stop = first + len(query) // self.block_ntokens * self.block_ntokens
        for start in range(first, stop, self.chunk_size):
            middle, end = start + self.chunk_size, start + 2 * self.chunk_size
            yield whole[:start], whole[start:middle], whole[middle:end] if middle < stop else None, whole

    def register_kvcache(self, kvcache: torch.Tensor | list[torch.Tensor]) -> Status[Any]:
        """Name the engine's own memory; nothing needs it, so OK."""
        del kvcache
        return Status.ok()

    @abstractmethod
    def flush(self) -> Status[Any]:
        """Wait until what was put is stored; TIMEOUT after 60 s."""

    @abstractmethod
    def close(self) -> None:
        """Write out what waits and release everything; idempotent."""

    # -- what a cache does

    @abstractmethod
    def _exists(self, arguments: Arguments) -> Status[int]: ...

    @abstractmethod
    def _acquire(self, arguments: Arguments) -> Status[tuple[int, KVCacheHandle]]: ...

    @abstractmethod
    def _get(self, arguments: Arguments) -> Status[int]: ...

    @abstractmethod
    def _prefetch(self, arguments: Arguments) -> Status[Any]: ...

    @abstractmethod
    def _allocate(self, arguments: Arguments) -> Status[KVCacheHandle]: ...

    @abstractmethod
    def _put(self, arguments: Arguments) -> Status[int]: ...

    @abstractmethod
    def _delete(self, arguments: Arguments) -> Status[Any]: ...

    def _counted(
        self, operation: Operation, function: Callable[[Arguments], Status[Any]], arguments: Arguments
    ) -> Status[Any]:
        start_s = time.perf_counter()
        sizes = (0 if arguments.prefix is None else len(arguments.prefix), len(arguments.query))
        status = _answered(function, arguments)
        self.metrics.mgr.record(operation, sizes, status, (time.perf_counter() - start_s) * 1e3)
        return status


def _answered(function: Callable[[Arguments], Status[Any]], arguments: Arguments) -> Status[Any]:
    """Call, and give what the arguments made impossible as a status."""
    try:
        return function(arguments)
    except (KeyMismatchError, SpecMismatchError, ValueError) as e:
        return Status(StatusCodes.INVALID, e)

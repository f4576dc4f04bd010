"""KV stored by another split of the heads: written under one tensor-parallel size, read under another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import torch

from kvstore.cache import KVCache
from kvstore.config import Config, load_config
from kvstore.errors import ConfigError, SpecMismatchError
from kvstore.namespace import Namespace
from kvstore.plugins import Registry
from kvstore.spec import BlockSpec
from kvstore.tensors import Blocks, rows_of
from kvstore.types import BlockStatus, Presence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kvstore.keys import KVCacheKey
    from kvstore.results import Lookup
    from kvstore.stats import Health, Stats

Heads = tuple[int, int]
"""Half-open range of the model's KV heads."""

T = TypeVar("T")

_PRESENCES: Final = (Presence.ABSENT, Presence.UNKNOWN, Presence.PRESENT)  # the worst part decides


@dataclass(frozen=True, slots=True)
class _Share:
    """What one stored range gives to a block.

    Attributes:
        stored: The range that its blocks hold.
        named: Whether their namespace says so.
        own_first: First head of the share, counted within the wanted block.
        stored_first: The same head, counted within the stored block.
        heads: How many.
    """

    stored: Heads
    named: bool
    own_first: int
    stored_first: int
    heads: int


class HeadCache:
    """Blocks of some heads, kept as blocks of other ranges of heads; made by :meth:`open`.

    A facade over one :class:`~kvstore.KVCache` for each stored range.  A put cuts a block along its
    heads, a get joins the parts again, bit for bit; where a part is missing, the block is.  When the
    one stored range is wider than the wanted one, blocks are read whole and cut, and nothing can be
    put.  Close it, or use it as a context manager.  Threads, misses, errors and forks are as for KVCache;
    calls end within the deadline of the config, of which each part gets its share.
    """

    def __init__(self, spec: BlockSpec, parts: Sequence[tuple[_Share, KVCache]]) -> None:
        """Use :meth:`open`."""
        self._spec = spec
        self._parts = tuple(parts)
        self._axis = spec.axes.index("H")

    @classmethod
    def open(
        cls,
        config: Config | Mapping[str, Any] | str | PathLike[str],
        *,
        spec: BlockSpec,
        namespace: Namespace,
        stored_heads: Sequence[Heads] | int,
        group: ProcessGroup | None = None,
    ) -> HeadCache:
        """Open the stored ranges that together hold the wanted heads.

        Args:
            config: As for :meth:`KVCache.open <kvstore.KVCache.open>`; the capacity of L1 is divided
                among the parts.  L1 must be enabled, and hold a prompt that is to be read at once.
            spec: Shape and dtype of the wanted blocks, with the heads of this rank.
            namespace: Whose KV this is; ``kv_heads`` says which heads are wanted.
            stored_heads: The ranges that were, and will be, stored: either several that make up the
                wanted one exactly, or one that contains it.  A number ``n`` stands for blocks of all
                ``n`` heads of the model whose namespace names no range.
            group: As for KVCache.open; all ranks need equally many parts.

        Raises:
            ConfigError: The ranges do not nest, or heads cannot be told apart in such blocks.
            PluginError, BackendError, CapacityError, DeadlineError: As for KVCache.open.
        """
        shares = _shares(spec, namespace, stored_heads)
        registry = Registry.discover()
        loaded = load_config(config, registry)
        if not loaded.l1.enabled:
            msg = "blocks are joined and cut in L1, and l1.enabled is false; enable it"
            raise ConfigError(msg)
        defaults = replace(loaded.defaults, deadline=loaded.defaults.deadline / len(shares))
        gate = replace(loaded.gate, prefill_tokens_per_s=loaded.gate.prefill_tokens_per_s * len(shares))
        total = sum(share.stored[1] - share.stored[0] for share in shares)
        with contextlib.ExitStack() as opened:
            parts: list[tuple[_Share, KVCache]] = []
            for share in shares:
                heads = share.stored[1] - share.stored[0]
                l1 = replace(loaded.l1, capacity=loaded.l1.capacity * heads // total)
                cache = KVCache.open(
                    replace(loaded, l1=l1, defaults=defaults, gate=gate),
                    spec=replace(spec, kv_heads=heads),
                    namespace=replace(namespace, kv_heads=share.stored if share.named else None),
                    registry=registry,
                    group=group,
                )
                parts.append((share, opened.enter_context(cache)))
            opened.pop_all()
        return cls(spec, parts)

    @property
    def spec(self) -> BlockSpec:
        """Shape and dtype of the wanted blocks."""
        return self._spec

    @property
    def caches(self) -> dict[Heads, KVCache]:
        """The cache of each stored range."""
        return {share.stored: cache for share, cache in self._parts}

    def __repr__(self) -> str:
        return f"<HeadCache of {self._spec.kv_heads} heads from {', '.join(map(_text, self.caches))}>"

    # -- reads

    def lookup(self, key: KVCacheKey) -> Lookup:
        """Say how many leading blocks are present with all their heads; ``by_tier`` is that of the scarcest part."""
        found = [cache.lookup(key) for _, cache in self._parts]
        return min(found, key=lambda lookup: lookup.blocks)

    def get(self, key: KVCacheKey, out: Blocks) -> int:
        """Copy the longest prefix of which all parts are available; ``out`` is untouched behind it.

        Args:
            key: The wanted blocks.
            out: Tensor ``(len(key), *spec.shape)`` or ``len(key)`` tensors of ``spec.shape``.

        Returns:
            Blocks delivered: no more than L1 holds of each part.
        """
        tensors = self._tensors(out, len(key), "out", writable=True)
        with contextlib.ExitStack() as leases:
            held = [leases.enter_context(cache.acquire(key)) for _, cache in self._parts]
            n_blocks = min(lease.blocks for lease in held)
            for (share, _), lease in zip(self._parts, held, strict=True):
                for target, stored in zip(tensors[:n_blocks], lease.tensors, strict=False):
                    self._own(target, share).copy_(self._of_stored(stored, share))
        return n_blocks

    def contains_each(self, key: KVCacheKey) -> list[Presence]:
        """Say for each block on its own whether all of its parts are present."""
        found = [cache.contains_each(key) for _, cache in self._parts]
        return [min(presences, key=_PRESENCES.index) for presences in zip(*found, strict=True)]

    def get_each(self, key: KVCacheKey, out: Blocks) -> list[BlockStatus]:
        """Copy every block of which all parts are available; the others keep the status of a part that is not."""
        tensors = self._tensors(out, len(key), "out", writable=True)
        staged: list[torch.Tensor] = []
        found: list[list[BlockStatus]] = []
        for _, cache in self._parts:
            staged.append(torch.empty((len(key), *cache.spec.shape), dtype=cache.spec.torch_dtype()))
            found.append(cache.get_each(key, staged[-1]))
        statuses = [_worst(each) for each in zip(*found, strict=True)]
        for (share, _), blocks in zip(self._parts, staged, strict=True):
            for target, stored, status in zip(tensors, blocks, statuses, strict=True):
                if status is BlockStatus.DELIVERED:
                    self._own(target, share).copy_(self._of_stored(stored, share))
        return statuses

    # -- writes

    def put(self, key: KVCacheKey, blocks: Blocks) -> int:
        """Store blocks, cut along their heads; returns the leading blocks of which all parts were accepted.

        Raises:
            ConfigError: The stored range is wider than these blocks.
        """
        tensors = self._tensors(blocks, len(key), "blocks")
        for share, _ in self._parts:
            if share.heads < share.stored[1] - share.stored[0]:
                msg = (
                    f"put() has {share.heads} of the heads {_text(share.stored)} that a stored block holds; "
                    "put into a KVCache, or into a HeadCache whose stored_heads are no wider than these blocks"
                )
                raise ConfigError(msg)
        return min(cache.put(key, [self._own(t, share) for t in tensors]) for share, cache in self._parts)

    def delete(self, key: KVCacheKey) -> int:
        """Delete every part of the blocks; returns of how many some part was present, or more."""
        return max(cache.delete(key) for _, cache in self._parts)

    def clear(self) -> None:
        """Forget every block of every part, for all processes."""
        for _, cache in self._parts:
            cache.clear()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every put before the call is stored, refused or dropped; ``timeout`` in seconds.

        Raises:
            DeadlineError: It did not end in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for _, cache in self._parts:
            cache.flush(None if until is None else max(0.0, until - time.monotonic()))

    def note_prefill(self, tokens: int, seconds: float, *, context_tokens: int = 0) -> None:
        """As :meth:`KVCache.note_prefill <kvstore.KVCache.note_prefill>`; each part may take its share of the time."""
        for _, cache in self._parts:
            cache.note_prefill(tokens, seconds / len(self._parts), context_tokens=context_tokens)

    # -- state

    def stats(self) -> dict[Heads, Stats]:
        """Counters for each stored range."""
        return self._each(KVCache.stats)

    def health(self) -> dict[Heads, Health]:
        """State for each stored range."""
        return self._each(KVCache.health)

    def close(self) -> None:
        """Close the parts; idempotent."""
        for _, cache in self._parts:
            cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- inner matters

    def _each(self, call: Callable[[KVCache], T]) -> dict[Heads, T]:
        return {share.stored: call(cache) for share, cache in self._parts}

    def _tensors(
        self, blocks: Blocks, n_blocks: int, argument: str, *, writable: bool = False
    ) -> Sequence[torch.Tensor]:
        if not isinstance(blocks, torch.Tensor | Sequence):
            msg = f"{argument} is a {type(blocks).__name__}; a HeadCache takes a tensor or a sequence of tensors"
            raise SpecMismatchError(msg)
        rows_of(blocks, self._spec, n_blocks, argument=argument, writable=writable)  # checks them
        return [block.detach() for block in blocks]

    def _own(self, block: torch.Tensor, share: _Share) -> torch.Tensor:
        return block.narrow(self._axis, share.own_first, share.heads)

    def _of_stored(self, block: torch.Tensor, share: _Share) -> torch.Tensor:
        return block.narrow(self._axis, share.stored_first, share.heads)


def _worst(statuses: Sequence[BlockStatus]) -> BlockStatus:
    return next((status for status in statuses if status is not BlockStatus.DELIVERED), BlockStatus.DELIVERED)


def _text(heads: Heads) -> str:
    return f"{heads[0]}-{heads[1] - 1}"


def _shares(spec: BlockSpec, namespace: Namespace, stored_heads: Sequence[Heads] | int) -> list[_Share]:
    """Check that the heads can be told apart and that the ranges nest; returns what each gives."""
    named = not isinstance(stored_heads, int)
    ranges = [(0, stored_heads)] if isinstance(stored_heads, int) else sorted((a, b) for a, b in stored_heads)
    first, stop = _wanted(spec, namespace)
    if len(ranges) == 1 and ranges[0][0] <= first and stop <= ranges[0][1]:
        return [_Share(ranges[0], named, 0, first - ranges[0][0], stop - first)]
    starts = [first, *(b for _, b in ranges)]
    if not ranges or [a for a, _ in ranges] != starts[:-1] or starts[-1] != stop or any(a >= b for a, b in ranges):
        msg = (
            f"stored_heads is {stored_heads!r}, and the heads {_text((first, stop))} are wanted: expected ranges "
            "that make them up without gap or overlap, or one range that contains them"
        )
        raise ConfigError(msg)
    return [_Share((a, b), named, a - first, 0, b - a) for a, b in ranges]


def _wanted(spec: BlockSpec, namespace: Namespace) -> Heads:
    """The heads of a rank's blocks."""
    problem = ""
    if spec.is_opaque:
        problem = "the blocks are opaque: only the engine knows where a head lies in them"
    elif spec.kv == 1:
        problem = "MLA latents (kv=1) are the same on every rank: open a KVCache with the same kv_heads on all of them"
    elif namespace.engine_layout is not None:
        problem = f"engine_layout {namespace.engine_layout!r} says that the bytes are not just heads side by side"
    elif namespace.lossy_codec is not None:
        problem = f"lossy codec {namespace.lossy_codec} ran over all heads of a block: other cuts give other bytes"
    elif namespace.kv_heads is None:
        problem = "namespace.kv_heads is not set, so nothing says which heads are wanted"
    elif namespace.kv_heads[1] - namespace.kv_heads[0] != spec.kv_heads:
        problem = f"namespace.kv_heads {namespace.kv_heads} is not as many heads as spec.kv_heads {spec.kv_heads}"
    if problem or namespace.kv_heads is None:
        msg = f"these blocks cannot be kept by heads: {problem}"
        raise ConfigError(msg)
    return namespace.kv_heads

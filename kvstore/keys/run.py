"""A run of consecutive blocks of one sequence: what keys of both kinds have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self, overload

from kvstore.errors import KeyMismatchError
from kvstore.keys.digest import MAX_BLOCK_TOKENS, KeyScope, check_int, coarse_digest


@dataclass(frozen=True, slots=True)
class Span:
    """Where a run of digests lies.

    Attributes:
        scope: What the chain commits to besides its blocks.
        parent: Digest of the block before the first one, if there is one and it is known.
        start_block: Number of the first block, in blocks of this span's size.
        position_known: Whether ``start_block`` counts from the sequence's first block.
        factor: Blocks of the chain per block of this span; above 1 after ``coarsen``.
    """

    scope: KeyScope
    parent: bytes | None = None
    start_block: int = 0
    position_known: bool = True
    factor: int = 1

    @property
    def head(self) -> bytes:
        """Digest that the first block was chained to; for stand-alone hashes the scope's seed."""
        if self.parent is not None and not self.scope.stands_alone:
            return self.parent
        return self.scope.seed if self.factor == 1 else coarse_digest(self.scope.seed, self.factor)


class DigestRun(Sequence[bytes], ABC):
    """Immutable run of block digests; the base of :class:`~kvstore.keys.KVCacheKey`.

    Its unit is the full block: ``len``, iteration, indexing and slicing count blocks.  Equal runs
    address the same blocks: kind, block size, group, every digest and what the first digest is
    chained to are compared; an incomplete last block is not.
    """

    __slots__ = ("_digests", "_span")

    kind: ClassVar[int]
    """1 for token keys, 2 for block-hash keys; the kind byte of stored names."""

    def __init__(self, span: Span, digests: tuple[bytes, ...]) -> None:
        self._span: Final = span
        self._digests: Final = digests

    @abstractmethod
    def _derive(self, span: Span, digests: tuple[bytes, ...], *, first_block: int, keep_tail: bool) -> Self:
        """Make a run of some of this one's blocks, which begin at this run's ``first_block``."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The 32-byte digest of each block, in order."""
        return self._digests

    @property
    def parent(self) -> bytes | None:
        """Digest of the block before the first one.

        ``None`` when the first block begins the sequence, and when ``position_known`` is false and
        the block before is not known either.
        """
        return self._span.parent

    @property
    def start_block(self) -> int:
        """Number of the first block in its sequence (see :attr:`position_known`)."""
        return self._span.start_block

    @property
    def position_known(self) -> bool:
        """Whether ``start_block`` counts from the sequence's first block.

        False for stand-alone block hashes made without ``prefix``: they may begin anywhere, and
        ``start_block`` counts from the first hash given.
        """
        return self._span.position_known

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._span.scope.block_tokens * self._span.factor

    @property
    def n_tokens(self) -> int:
        """Tokens in whole blocks: ``len(key) * block_tokens``."""
        return len(self._digests) * self.block_tokens

    @property
    def group(self) -> int:
        """KV group of hybrid models, 0 otherwise."""
        return self._span.scope.group

    @property
    def salt(self) -> bytes | str | None:
        """The salt that isolates this key's tenant; ``None`` shares."""
        return self._span.scope.salt

    @property
    def adapter(self) -> str | None:
        """Name and revision of the weight adapter; ``None`` is the base model."""
        return self._span.scope.adapter

    def prefix(self, n_blocks: int) -> Self:
        """The first ``n_blocks`` blocks, without an incomplete last block.

        Raises:
            ValueError: ``n_blocks`` is not from 0 to ``len(self)``.
        """
        self._check_count(n_blocks)
        return self._cut(0, n_blocks, keep_tail=False)

    def suffix(self, n_blocks: int) -> Self:
        """What follows the first ``n_blocks`` blocks, with the incomplete last block if any.

        The digests stay those of the whole sequence, so a suffix can be looked up alone.

        Raises:
            ValueError: ``n_blocks`` is not from 0 to ``len(self)``.
        """
        self._check_count(n_blocks)
        return self._cut(n_blocks, len(self), keep_tail=True)

    def split(self, n_blocks: int) -> tuple[Self, Self]:
        """``(prefix(n_blocks), suffix(n_blocks))``."""
        return self.prefix(n_blocks), self.suffix(n_blocks)

    def coarsen(self, n_blocks: int) -> Self:
        """The same sequence in blocks of ``n_blocks`` blocks, for a store with larger blocks.

        A group is named by its last block's digest, under a tag of its own: a coarse key never
        equals a key made with the larger block size in the first place.  An incomplete last group
        is not addressable.  ``coarsen(1)`` is the key itself.

        Stand-alone hashes whose position is unknown are grouped from the first hash given; the
        caller states by that that it begins a group.  If it does not, groups miss; they can't
        return another group's bytes.

        Args:
            n_blocks: Blocks per group, at least 1.

        Raises:
            KeyMismatchError: The key does not begin with a whole group, or is coarse already.
        """
        check_int("n_blocks", n_blocks, 1, MAX_BLOCK_TOKENS // self._span.scope.block_tokens)
        if n_blocks == 1:
            return self
        span = self._span
        if span.factor != 1:
            raise KeyMismatchError(
                f"this key is coarse already, by {span.factor}; "
                f"coarsen the key it was made from, by {span.factor * n_blocks}"
            )
        if span.start_block % n_blocks:
            raise KeyMismatchError(
                f"this key starts at block {span.start_block}; "
                f"expected a multiple of {n_blocks} to coarsen by {n_blocks}"
            )
        parent = None if span.parent is None else coarse_digest(span.parent, n_blocks)
        coarse = replace(span, parent=parent, start_block=span.start_block // n_blocks, factor=n_blocks)
        digests = tuple(coarse_digest(last, n_blocks) for last in self._digests[n_blocks - 1 :: n_blocks])
        return self._derive(coarse, digests, first_block=0, keep_tail=True)

    def _check_count(self, n_blocks: int) -> None:
        if not 0 <= n_blocks <= len(self):
            raise ValueError(f"n_blocks is {n_blocks}; expected 0 to {len(self)}, the blocks of this key")

    def _cut(self, first: int, stop: int, *, keep_tail: bool) -> Self:
        span = self._span
        if first:
            span = replace(span, parent=self._digests[first - 1], start_block=span.start_block + first)
        return self._derive(span, self._digests[first:stop], first_block=first, keep_tail=keep_tail)

    def __len__(self) -> int:
        return len(self._digests)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._digests)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> bytes | Self:
        if not isinstance(index, slice):
            return self._digests[index]
        first, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"slice step is {step}; expected 1: a key is a run of consecutive blocks")
        return self._cut(first, max(first, stop), keep_tail=index.stop is None)

    def _identity(self) -> tuple[Any, ...]:
        return (self.kind, self.block_tokens, self.group, self._span.head, self._digests)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DigestRun):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        # For sets and dicts of this process only; head and last digest stand for the rest.
        return hash((self._span.head, len(self), self._digests[-1:]))

    def __repr__(self) -> str:
        where = f"from block {self.start_block}" if self.position_known else "position unknown"
        named = f", adapter {self.adapter!r}" if self.adapter is not None else ""
        salted = ", salted" if self.salt is not None else ""
        group = f", group {self.group}" if self.group else ""
        return (
            f"<{type(self).__name__}: {len(self)} blocks of {self.block_tokens} tokens, {where}{group}{named}{salted}>"
        )

"""Tokens and block hashes as callers hand them over: cheap slices of one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.compat.aibrix.sources import HashSource, KeySource, TokenSource


class KVCacheIds(ABC):
    """A run of one sequence's tokens or block hashes; ``len`` counts tokens.

    A view: slices share the values, which were copied when the first view was made, so what the
    caller does to his list or array afterwards changes no key.  Immutable and hashable.

    Attributes:
        source: The values that this view and its slices share.
        start: First value of the view, in values of the source.
        stop: Behind the last.
    """

    source: KeySource
    start: int
    stop: int

    @property
    def unit_tokens(self) -> int:
        """Tokens that one value stands for."""
        return 1

    @abstractmethod
    def _view(self, start: int, stop: int) -> Self:
        """Another view of the same source."""

    def follows(self, before: KVCacheIds) -> bool:
        """Whether this view begins where ``before`` ends, in the same sequence."""
        return before.source is self.source and before.stop == self.start

    def __len__(self) -> int:
        return (self.stop - self.start) * self.unit_tokens

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tokens from {self.start * self.unit_tokens})"


class TokenListView(KVCacheIds):
    """A run of tokens.

    Args:
        data: Token ids; a list becomes int32, an integer array keeps its dtype.
        start: First token of the view; negative counts from the end.
        stop: Behind the last.

    Raises:
        TypeError: The values are no integers.
        ValueError: They have more than one dimension.
        OverflowError: A number of a list does not fit 32 bits.
    """

    def __init__(
        self, data: Sequence[int] | npt.NDArray[Any], start: int | None = None, stop: int | None = None
    ) -> None:
        values = np.array(data, dtype=None if isinstance(data, np.ndarray) else np.int32)
        if values.dtype.kind not in "iu" and values.size:
            msg = f"TokenListView got values of dtype {values.dtype}; expected integers"
            raise TypeError(msg)
        if values.ndim != 1:
            msg = f"TokenListView got values of shape {values.shape}; expected one dimension"
            raise ValueError(msg)
        self._values = values
        self.source = TokenSource(values)
        n_tokens = len(values)
        bounds = (start or 0, n_tokens if stop is None else stop)
        self.start, self.stop = sorted(
            min(max(0, bound + n_tokens if bound < 0 else bound), n_tokens) for bound in bounds
        )

    def _view(self, start: int, stop: int) -> Self:
        view = object.__new__(type(self))
        view._values, view.source, view.start, view.stop = self._values, self.source, start, stop
        return view

    def __getitem__(self, index: int | slice) -> Any:
        """A view for a slice of step 1, a token id for an index."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                msg = f"slice step is {step}; expected 1: a view is a run of consecutive tokens"
                raise ValueError(msg)
            return self._view(self.start + start, self.start + max(start, stop))
        if not -len(self) <= index < len(self):
            msg = f"index {index} is out of range for {len(self)} tokens"
            raise IndexError(msg)
        return self._values[self.start + index % len(self)]

    def __add__(self, other: object) -> TokenListView:
        if not isinstance(other, TokenListView):
            msg = f"cannot append {type(other).__name__} to a TokenListView; expected a TokenListView"
            raise TypeError(msg)
        if other.follows(self):
            return self._view(self.start, other.stop)
        return TokenListView(np.concatenate([self.to_numpy(), other.to_numpy()]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_numpy())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenListView):
            return False
        if self.source is other.source:
            return (self.start, self.stop) == (other.start, other.stop) or not len(self) + len(other)
        return np.array_equal(self.to_numpy(), other.to_numpy())

    def __hash__(self) -> int:
        return hash(self.to_numpy().astype(np.int64, copy=False).tobytes())

    def to_numpy(self) -> npt.NDArray[Any]:
        """The tokens as a read-only array, not copied."""
        return self._values[self.start : self.stop]

    def memoryview(self) -> memoryview:
        """The tokens' memory, read only."""
        return self.to_numpy().data

    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.to_numpy().nbytes

    @staticmethod
    def from_numpy(data: npt.NDArray[Any]) -> TokenListView:
        """Make a view of an array, which is copied."""
        return TokenListView(data)

    @staticmethod
    def calculate_size(ntokens: int) -> int:
        """Bytes of ``ntokens`` tokens of 32 bits."""
        return 4 * ntokens


class BlockHashes(KVCacheIds):
    """A run of block hashes, one per block of the engine.

    Args:
        data: Hashes as text.
        block_ntokens: Tokens per block.

    Raises:
        TypeError: ``data`` is no list of texts.
        ValueError: ``block_ntokens`` is below 1.
    """

    def __init__(self, data: Sequence[str], block_ntokens: int) -> None:
        if not isinstance(data, (list, tuple)) or not set(map(type, data)) <= {str}:
            msg = f"BlockHashes got {type(data).__name__}; expected a list of str"
            raise TypeError(msg)
        if block_ntokens < 1:
            msg = f"BlockHashes got block_ntokens={block_ntokens}; expected at least 1"
            raise ValueError(msg)
        self.block_ntokens = block_ntokens
        self.source = HashSource(data, block_ntokens)
        self._values = self.source.values
        self.start, self.stop = 0, len(self._values)

    @property
    def unit_tokens(self) -> int:
        """Tokens per block."""
        return self.block_ntokens

    def _view(self, start: int, stop: int) -> Self:
        view = object.__new__(type(self))
        view._values, view.source, view.start, view.stop = self._values, self.source, start, stop
        view.block_ntokens = self.block_ntokens
        return view

    def __getitem__(self, index: int | slice) -> Any:
        """For a slice, in tokens and of whole blocks, a view; for an index, in blocks, the hash."""
        if not isinstance(index, slice):
            return self._hashes()[index]
        bounds = slice(index.start, index.stop, self.block_ntokens if index.step is None else index.step)
        cuts = [divmod(bound, self.block_ntokens) for bound in bounds.indices(len(self))]
        if any(rest for _, rest in cuts):
            msg = f"{index} does not fall on whole blocks of {self.block_ntokens} tokens"
            raise ValueError(msg)
        (start, _), (stop, _), (step, _) = cuts
        if step != 1:
            return BlockHashes(self._hashes()[start:stop:step], self.block_ntokens)
        return self._view(self.start + start, self.start + max(start, stop))

    def __add__(self, other: object) -> BlockHashes:
        if not isinstance(other, BlockHashes):
            msg = f"cannot append {type(other).__name__} to BlockHashes; expected BlockHashes"
            raise TypeError(msg)
        if other.block_ntokens != self.block_ntokens:
            msg = f"cannot append blocks of {other.block_ntokens} tokens to blocks of {self.block_ntokens}"
            raise ValueError(msg)
        if other.follows(self):
            return self._view(self.start, other.stop)
        return BlockHashes(self._hashes() + other._hashes(), self.block_ntokens)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockHashes):
            return False
        return self.block_ntokens == other.block_ntokens and self._hashes() == other._hashes()

    def __hash__(self) -> int:
        return hash((self.block_ntokens, self._hashes()))

    def _hashes(self) -> tuple[str, ...]:
        return self._values[self.start : self.stop]


KVCacheKeyTypes: TypeAlias = TokenListView | BlockHashes


class KVCacheKey:
    """Prefix and query in one; equal when both address the same blocks.

    Args:
        prefix: What precedes the query, if anything.
        query: What the call is about, of the same kind.

    Raises:
        TypeError: ``query`` is neither tokens nor block hashes, or ``prefix`` is of another kind.
        ValueError: The two have different block sizes.
    """

    def __init__(self, prefix: KVCacheKeyTypes | None, query: KVCacheKeyTypes) -> None:
        check_pair(prefix, query)
        self.prefix = prefix
        self.query = query

    def __len__(self) -> int:
        return len(self.prefix or ()) + len(self.query)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheKey) or self.query != other.query:
            return False
        return self.prefix == other.prefix if self.prefix and other.prefix else not (self.prefix or other.prefix)

    def __hash__(self) -> int:
        return hash((self.prefix or None, self.query))

    def __repr__(self) -> str:
        return f"KVCacheKey(prefix={self.prefix}, query={self.query})"


def check_pair(prefix: object, query: object) -> None:
    """Raise unless ``query`` is tokens or block hashes and ``prefix`` is nothing or of the same kind."""
    if not isinstance(query, (TokenListView, BlockHashes)):
        msg = f"query is of type {type(query).__name__}; expected TokenListView or BlockHashes"
        raise TypeError(msg)
    if prefix is None:
        return
    if not isinstance(prefix, TokenListView if isinstance(query, TokenListView) else BlockHashes):
        msg = f"prefix is of type {type(prefix).__name__}; expected {type(query).__name__} like the query, or None"
        raise TypeError(msg)
    if prefix.unit_tokens != query.unit_tokens:
        msg = f"prefix has blocks of {prefix.unit_tokens} tokens, the query of {query.unit_tokens}; expected one size"
        raise ValueError(msg)

"""Fuzzer bytes as a source of choices, so that every input means something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Takes bytes off the front; an exhausted source answers zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> bytes:
        """What is left."""
        return self._data[self._at :]

    def take(self, n_bytes: int) -> bytes:
        """That many bytes."""
        piece = self._data[self._at : self._at + n_bytes]
        self._at += n_bytes
        return piece.ljust(n_bytes, b"\0")

    def number(self, n_bytes: int = 1) -> int:
        """A number of that many bytes."""
        return int.from_bytes(self.take(n_bytes), "little")

    def below(self, top: int) -> int:
        """A number from 0 to ``top - 1``, of one byte."""
        return self.number() % top

    def one(self, values: Sequence[T]) -> T:
        """One of some values."""
        return values[self.below(len(values))]

    def text(self) -> str:
        """A short text without surrogates."""
        return self.take(self.below(9)).decode("utf-8", "replace")

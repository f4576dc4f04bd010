"""Two caches that get the same calls, and the comparison of what they answer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvstore import Namespace
from kvstore.compat import aibrix

BLOCK_TOKENS = 4
KINDS = ("tokens", "hashes")
MakePair = Callable[..., "Pair"]


def library() -> Any:
    """AIBrix's package; skips where it is not installed."""
    package = pytest.importorskip("aibrix_kvcache", reason="aibrix-kvcache is not installed: make test-engines")
    import aibrix_kvcache.spec

    logging.getLogger("aibrix_kvcache").setLevel(logging.ERROR)
    return package, aibrix_kvcache.spec


def block_bytes(label: object, nbytes: int) -> torch.Tensor:
    """Bytes that follow from a block's name, every bit pattern among them."""
    seed = int.from_bytes(hashlib.sha256(repr(label).encode()).digest()[:6], "little")
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Side:
    """One library with an open cache.

    Attributes:
        name: For messages.
        package: Its public names.
        spec: Where its specs are.
        options: How its blocks look.
        cache: Open.
        kept: Key objects made before, so that a call can be made with the same object again.
    """

    name: str
    package: Any
    spec: Any
    options: dict[str, Any]
    cache: Any = None
    kept: dict[Any, Any] = field(default_factory=dict)

    def open(self) -> None:
        tensor = self.spec.KVCacheTensorSpec(
            heads=self.options.get("heads", [0, 1]), layers=self.options.get("layers", [0, 1]), head_size=8
        )
        block = self.spec.KVCacheBlockSpec(
            self.options.get("block_ntokens", BLOCK_TOKENS),
            self.options.get("dtype", torch.bfloat16),
            self.spec.KVCacheBlockLayout[self.options.get("layout", "NCLD")],
            tensor,
        )
        self.cache = self.package.BaseKVCacheManager(self.package.KVCacheConfig(block, self.spec.ModelSpec(256)))

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
            self.cache = None

    def reopen(self) -> None:
        self.cache.flush()
        self.close()
        self.open()

    def ids(self, kind: str, values: Sequence[Any], *, fresh: bool = False) -> Any:
        """A key object of these tokens or hashes; the one made before, unless ``fresh``."""
        make = self.package.TokenListView if kind == "tokens" else self._hashes
        name = (kind, tuple(values))
        if fresh or name not in self.kept:
            self.kept[name] = make(list(values))
        return self.kept[name]

    def _hashes(self, values: list[str]) -> Any:
        return self.package.BlockHashes(values, self.options.get("hash_ntokens", BLOCK_TOKENS))

    def put(self, prefix: Any, query: Any, labels: Sequence[object]) -> Any:
        """Reserve, fill with the bytes that the labels name, store."""
        status = self.cache.allocate_for(prefix, query)
        if not status.is_ok():
            return status
        handle = status.get()
        for tensor, label in zip(handle.to_tensors(), labels, strict=True):
            tensor.reshape(-1).view(torch.uint8).copy_(block_bytes(label, self.cache.block_nbytes))
        return self.cache.put(prefix, query, handle)

    def found(self, prefix: Any, query: Any) -> list[bytes]:
        """The bytes of the leading blocks that ``acquire`` gives, and nothing held any more."""
        status = self.cache.acquire(prefix, query)
        if not status.is_ok():
            assert status.is_not_found(), status
            return []
        n_tokens, handle = status.get()
        assert n_tokens == len(handle) * self.cache.block_size
        blocks = [raw(tensor) for tensor in handle.to_tensors()]
        handle.release()
        return blocks

    def named(self, *labels: object) -> list[bytes]:
        """What :meth:`found` gives for blocks put with these labels."""
        return [raw(block_bytes(label, self.cache.block_nbytes)) for label in labels]


def sides_of(**options: Any) -> tuple[Side, Side]:
    """AIBrix and ours, open, with the same variables and blocks."""
    package, spec = library()
    aibrix.configure(namespace=Namespace(model="m", revision="r"), block_hashes=options.pop("meaning", "chained"))
    sides = Side("AIBrix", package, spec, options), Side("kvstore", aibrix, aibrix, dict(options))
    for side in sides:
        side.open()
    return sides


@dataclass
class Pair:
    """AIBrix and ours; every call goes to both."""

    theirs: Side
    ours: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.theirs, self.ours

    def same(self, call: Callable[[Side], Any]) -> Any:
        """Make a call on both; the answer, which must be the same."""
        answers = [call(side) for side in self.sides]
        assert plain(answers[0]) == plain(answers[1]), f"AIBrix: {answers[0]}\nkvstore: {answers[1]}"
        return answers[1]


def plain(answer: Any) -> Any:
    """What is compared of an answer: codes, numbers, shapes, dtypes and bytes; not messages or classes."""
    if hasattr(answer, "error_code"):
        return answer.error_code.name, plain(answer.value) if answer.is_ok() else None
    if hasattr(answer, "to_tensors"):
        return [(tuple(t.shape), str(t.dtype), raw(t)) for t in answer.to_tensors()]
    if isinstance(answer, torch.Tensor):
        return tuple(answer.shape), str(answer.dtype), raw(answer)
    if type(answer).__name__ in {"TokenListView", "BlockHashes"}:
        return type(answer).__name__, len(answer), [str(value) for value in answer]
    if isinstance(answer, (tuple, list)):
        return [plain(part) for part in answer]
    return answer

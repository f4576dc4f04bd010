"""One medium under test: a cache on it, its stored bytes behind the cache's back, and what lies around it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.plugins import Registry
from tests.support_faults import NAMESPACE, SMALL, WatchedCache

MIB: Final = 1 << 20
TIER: Final = "tier"
"""Name of the tier under test in every config."""

MAGIC: Final = b"KVB\x01"  # how a record begins

Place = Any
"""Where one stored value lies; what it is depends on the medium, and it compares equal to itself."""


class Store(ABC):
    """A medium in a directory of its own (or a bucket).

    ``values``, ``read``, ``write`` and ``remove`` go around the cache, also while one is open in this process.
    A stored value is everything the medium keeps for one block: the record, and what surrounds it.
    """

    kind: ClassVar[str]
    deadline_s: ClassVar[float] = 5.0
    evicts: ClassVar[bool] = True
    """Whether the medium keeps within its capacity by itself."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root

    @classmethod
    def make(cls, root: Path) -> Store:
        """An empty medium; whoever makes it closes it."""
        return cls(root)

    # -- through the cache

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """The backend's own keys of the ``[[l2]]`` section."""

    def config(
        self,
        *,
        l1: str | None = None,
        below: Sequence[dict[str, Any]] = (),
        sections: dict[str, Any] | None = None,
        **tier: Any,
    ) -> dict[str, Any]:
        """A config with this tier, L1 of a size or none, tiers below it, and other sections."""
        section = {"name": TIER, "capacity": "64MiB", "codec": "none", "admit": "all", "deadline": self.deadline_s}
        first = {} if l1 is None else {"capacity": l1}
        tiers = [{**section, **self.section(), **tier}, *below]
        return {"l1": {"enabled": l1 is not None, **first}, "l2": tiers, **(sections or {})}

    def open(
        self,
        *,
        spec: BlockSpec = SMALL,
        namespace: Namespace = NAMESPACE,
        l1: str | None = None,
        below: Sequence[dict[str, Any]] = (),
        sections: dict[str, Any] | None = None,
        registry: Registry | None = None,
        **tier: Any,
    ) -> WatchedCache:
        """Open a cache on the medium; L1 is off unless a size is given."""
        config = self.config(l1=l1, below=below, sections=sections, **tier)
        patience_s = sum(t.get("deadline", self.deadline_s) for t in config["l2"]) + 1.0
        return WatchedCache(KVCache.open(config, spec=spec, namespace=namespace, registry=registry), patience_s)

    def alone(self) -> dict[str, Any]:
        """Options with which each block is a value of its own."""
        return {}

    # -- behind the cache's back

    @abstractmethod
    def places(self) -> list[Place]:
        """Where values lie, in any order."""

    @abstractmethod
    def find(self, digest: bytes) -> Place | None:
        """Where the value of a block lies."""

    @abstractmethod
    def read(self, place: Place) -> bytes:
        """The stored value."""

    @abstractmethod
    def write(self, place: Place, value: bytes) -> None:
        """Replace the stored value, leaving everything else as it is."""

    @abstractmethod
    def remove(self, place: Place) -> None:
        """Take the value away."""

    def at(self, key: KVCacheKey, i: int = 0) -> Place:
        """Where block ``i`` of a key lies, which must be stored."""
        place = self.find(key[i])
        assert place is not None, f"block {i} is not stored"
        return place

    def record_span(self, value: bytes) -> slice:
        """Where the core's record lies in a stored value."""
        return slice(value.index(MAGIC), None)

    def head_bytes(self, value: bytes) -> int:
        """Where the block's own bytes begin in a stored value."""
        start = self.record_span(value).start
        segments = int.from_bytes(value[start + 124 : start + 128], "little")
        return int(start + 192 + 16 * segments)

    def resized(self, value: bytes, nbytes: int) -> bytes:
        """A stored value of another length, as far as the medium can hold one."""
        return (value * (1 + nbytes // len(value)))[:nbytes]

    def swap(self, a: Place, b: Place) -> None:
        """Exchange two records of the same length, leaving what surrounds them."""
        values = [self.read(a), self.read(b)]
        spans = [self.record_span(value) for value in values]
        records = [value[span] for value, span in zip(values, spans, strict=True)]
        assert len(records[0]) == len(records[1])
        for place, value, span, record in zip((a, b), values, spans, records[::-1], strict=True):
            self.write(place, value[: span.start] + record)

    def swap_values(self, a: Place, b: Place) -> None:
        """Exchange everything the medium keeps for two blocks."""
        value_a, value_b = self.read(a), self.read(b)
        self.write(a, value_b)
        self.write(b, value_a)

    # -- what lies around

    def strangers(self) -> list[str]:
        """Files that are neither values nor known metadata: leftovers."""
        return []

    def used_bytes(self) -> int:
        """Bytes the medium really takes."""
        return sum(p.stat().st_blocks * 512 for p in self.root.rglob("*") if p.is_file())

    def bound(self, capacity_bytes: int) -> int:
        """Bytes it may take at most (G4)."""
        return capacity_bytes + capacity_bytes // 50

    # -- for other processes

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "root": str(self.root), **self.facts()})

    def facts(self) -> dict[str, Any]:
        """Constructor arguments besides ``root``."""
        return {}

    def close(self) -> None:
        """Let go of what reads and writes behind the cache's back."""


def load(text: str) -> Store:
    """The store another process described with ``to_json``."""
    from tests.faults.media import MEDIA

    facts = json.loads(text)
    return MEDIA[facts.pop("kind")](Path(facts.pop("root")), **facts)


LETTERS: Final = {"L": "lmdb", "N": "nvme", "T": "tree", "S": "s3"}


def over(letters: str) -> Callable[[Any], Any]:
    """Run a scenario once for each medium: L(MDB), N(VMe segments), T(ree of files), S(3)."""
    mark = pytest.mark.parametrize("store", [LETTERS[letter] for letter in letters], indirect=True)

    def decorate(test: Any) -> Any:
        test.media = letters
        return mark(test)

    return decorate

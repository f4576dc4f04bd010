"""Some blocks of a key, as a tier is asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.keys import KVCacheKey


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of a key by index; the key tells what sequence they belong to.

    Attributes:
        key: The whole key of the caller.
        indices: Which of its blocks, counted from its first one.
    """

    key: KVCacheKey
    indices: Sequence[int]

    @classmethod
    def rest(cls, key: KVCacheKey, start: int = 0) -> Part:
        """The blocks from ``start`` on."""
        return cls(key, range(start, len(key)))

    def among(self, positions: Sequence[int]) -> Part:
        """Those blocks of this part that stand at ``positions`` in it."""
        return Part(self.key, [self.indices[k] for k in positions])

    @property
    def digests(self) -> Sequence[bytes]:
        """The blocks' digests, in order."""
        digests, indices = self.key.digests, self.indices
        if isinstance(indices, range) and indices.step == 1:
            return digests[indices.start : indices.stop]
        return [digests[i] for i in indices]

    def __len__(self) -> int:
        return len(self.indices)

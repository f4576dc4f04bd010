"""LMCache's keys as kvstore keys."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvstore import KVCacheKey


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Everything that LMCache tells apart chunks by.

    Attributes:
        chunk_hash: LMCache's hash of the chunk and all before it: an integer or bytes, as given.
        model: The model's name.
        part: What else says which bytes these are, in order: ranks, dtype, layer.
        salt: LMCache's salt or tags; None for none.
        group: Object group of hybrid models.
    """

    chunk_hash: int | bytes
    model: str
    part: tuple[int | str, ...] = ()
    salt: str | None = None
    group: int = 0

    @property
    def block_hash(self) -> str:
        """The chunk's hash together with the name of the slice it is of, without any loss."""
        value = self.chunk_hash.hex() if isinstance(self.chunk_hash, bytes) else self.chunk_hash
        kind = "bytes" if isinstance(self.chunk_hash, bytes) else "int"
        return json.dumps([kind, value, self.model, *self.part], separators=(",", ":"))


def key_of(names: Sequence[ChunkName], block_tokens: int) -> KVCacheKey:
    """Make one key for chunks of one salt and one group; each digest depends on its chunk alone."""
    first = names[0]
    return KVCacheKey.from_block_hashes(
        [name.block_hash for name in names],
        block_tokens=block_tokens,
        chained=True,  # LMCache's hashes commit to the whole prefix
        salt=first.salt,
        group=first.group,
    )


def batches(names: Sequence[ChunkName]) -> list[list[int]]:
    """Indices of ``names``, split where one key cannot hold them: by salt and group."""
    found: dict[Hashable, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault((name.salt, name.group), []).append(i)
    return list(found.values())

"""vLLM's offload keys as kvstore keys: hash and KV group in, a run of consecutive blocks out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import KeyMismatchError
from kvstore.keys import BlockHashKey, KVCacheKey
from kvstore_vllm.observing import KnownBlocks

_GROUP_BYTES: Final = 4  # big-endian, behind the block hash: make_offload_key in vLLM's kv_offload/base.py
_SEQUENCES: Final = 64  # prompts whose keys are remembered; about as many as are being prefilled


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Consecutive blocks, or blocks whose place is not known.

    Attributes:
        key: Names the blocks.
        indices: Where each of them stands among the offload keys that were asked for.
    """

    key: BlockHashKey
    indices: list[int]


class OffloadKeys:
    """Makes kvstore keys from offload keys; thread-safe.

    Backends that pack consecutive blocks into one object find a block by its place in the prompt, so
    places are passed on where vLLM tells them.

    Args:
        block_tokens: Tokens per block of the cache.
        group_tokens: Tokens per chunk of each KV group.
        known: Is told what every block is called in vLLM.
        salt: Isolates a tenant.
    """

    def __init__(
        self, *, block_tokens: int, group_tokens: Sequence[int], known: KnownBlocks, salt: str | None = None
    ) -> None:
        self._block_tokens = block_tokens
        self._group_tokens = tuple(group_tokens)
        self._known = known
        self._salt = salt
        self._lock = threading.Lock()
        self._sequences: OrderedDict[tuple[Any, int], BlockHashKey] = OrderedDict()

    def part(self, salt: str) -> None:
        """Share nothing from now on with what was stored under the salt so far."""
        with self._lock:
            self._salt = salt if self._salt is None else f"{self._salt}\n{salt}"
            self._sequences.clear()

    def runs(self, offload_keys: Sequence[bytes], context: Any) -> list[KeyRun]:
        """Cut offload keys of one request into runs.

        Args:
            offload_keys: As vLLM passes them: the keys of one request, of any KV groups.
            context: vLLM's ``ReqContext``; its places of keys are used as far as they go.
        """
        places = _places(context)
        by_group: dict[int, list[tuple[int, int]]] = {}
        placed: set[int] = set()
        for index, offload_key in enumerate(offload_keys):
            group = int.from_bytes(offload_key[-_GROUP_BYTES:], "big")
            position = self._position(places.get(offload_key), group)
            by_group.setdefault(group, []).append((position, index))
            if position >= 0:
                placed.add(group)
        runs: list[KeyRun] = []
        for group, found in by_group.items():
            sequence = self._sequence(group, places, max(found)[0], context) if group in placed else None
            if sequence is None or min(found)[0] < 0:
                indices = [index for _, index in found]
                runs.append(KeyRun(self._key([offload_keys[i] for i in indices], group), indices))
                continue
            for first, indices in _consecutive(sorted(found)):
                runs.append(KeyRun(sequence.suffix(first).prefix(len(indices)), indices))
        for run in runs:
            self._known.note(run.key.digests, [offload_keys[i] for i in run.indices])
        return runs

    def _position(self, end_token: int | None, group: int) -> int:
        """Number of the block in its prompt, -1 when that is not known."""
        if end_token is None or group >= len(self._group_tokens) or end_token % self._group_tokens[group]:
            return -1
        return end_token // self._group_tokens[group] - 1

    def _sequence(self, group: int, places: dict[bytes, int], last: int, context: Any) -> BlockHashKey | None:
        """The key of a prompt from its first block to block ``last``; None when a block is not known."""
        name = (getattr(context, "req_id", None), group)
        with self._lock:
            known = self._sequences.get(name)
            if known is not None and len(known) > last:
                self._sequences.move_to_end(name)
                return known
        in_order: list[bytes | None] = [None] * (last + 1)
        for offload_key, end_token in places.items():
            if int.from_bytes(offload_key[-_GROUP_BYTES:], "big") == group:
                position = self._position(end_token, group)
                if 0 <= position <= last:
                    in_order[position] = offload_key
        hashes = [offload_key for offload_key in in_order if offload_key is not None]
        if len(hashes) <= last:
            return None
        sequence = self._key(hashes, group, prefix=[])
        with self._lock:
            self._sequences[name] = sequence
            while len(self._sequences) > _SEQUENCES:
                self._sequences.popitem(last=False)
        return sequence

    def _key(self, offload_keys: Sequence[bytes], group: int, prefix: list[bytes] | None = None) -> BlockHashKey:
        for offload_key in offload_keys:
            if len(offload_key) <= _GROUP_BYTES:
                raise KeyMismatchError(f"offload key {offload_key!r} has no block hash before its KV group")
        return KVCacheKey.from_block_hashes(
            [offload_key[:-_GROUP_BYTES] for offload_key in offload_keys],
            block_tokens=self._block_tokens,
            chained=True,
            prefix=prefix,
            salt=self._salt,
            group=group,
        )


def _places(context: Any) -> dict[bytes, int]:
    """End token of every key of the request, as vLLM notes them; empty where it does not."""
    noted = getattr(context, "_offload_key_positions", None)
    # A copy in one step: the scheduler goes on adding to it.
    return dict(noted) if isinstance(noted, dict) else {}


def _consecutive(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Cut sorted (position, index) pairs where a position is missing or repeated."""
    first, indices = found[0][0], [found[0][1]]
    for position, index in found[1:]:
        if position != first + len(indices):
            yield first, indices
            first, indices = position, []
        indices.append(index)
    yield first, indices

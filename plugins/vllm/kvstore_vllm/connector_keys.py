"""vLLM's block hashes as kvstore keys whose place in the prompt is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.keys import BlockHashKey, KVCacheKey
from kvstore_vllm.connector_meta import BlockRun


class RequestKeys:
    """Makes keys of block runs, and continues those of a request; belongs to one thread.

    Backends that pack consecutive blocks find one by its place, so a run is made as a continuation of
    the request's run before it.  Without that one it is a run of unknown place: the same blocks.

    Args:
        block_tokens: Tokens per block.
        salt: Isolates a tenant.
    """

    def __init__(self, block_tokens: int, salt: str | None) -> None:
        self._block_tokens = block_tokens
        self._salt = salt
        self._ends: dict[str, BlockHashKey] = {}

    def of(self, run: BlockRun) -> BlockHashKey:
        """The key of a run's blocks."""
        if run.first_hash == 0:
            key = prompt_key(run.hashes, self._block_tokens, self._salt)
        else:
            end = self._ends.get(run.request_id)
            follows = end is not None and end.start_block == run.first_hash
            key = KVCacheKey.from_block_hashes(
                run.hashes,
                block_tokens=self._block_tokens,
                chained=True,
                prefix=end if follows else None,
                salt=self._salt,
            )
        self._ends[run.request_id] = key.suffix(len(key))
        return key.suffix(run.start_block - run.first_hash)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that will have no more runs."""
        for request_id in request_ids:
            self._ends.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._ends)


def prompt_key(hashes: Sequence[bytes], block_tokens: int, salt: str | None) -> BlockHashKey:
    """The key of the blocks of a prompt from its first one on."""
    return KVCacheKey.from_block_hashes(hashes, block_tokens=block_tokens, chained=True, prefix=(), salt=salt)

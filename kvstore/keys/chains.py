"""Block hashes as engines make them, so that a library user can address what an engine stored.

Neither engine is imported.  Both chains commit to their whole prefix: use the results with
``KVCacheKey.from_block_hashes(..., chained=True)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from struct import iter_unpack
from typing import Final, TypeAlias

from kvstore.keys.digest import DIGEST_BYTES, MAX_BLOCK_TOKENS, TOKEN_ID_BYTES, check_int
from kvstore.keys.token_ids import TokenIds, token_bytes

CborValue: TypeAlias = "int | bytes | str | Sequence[CborValue] | None"

_CBOR_NULL: Final = b"\xf6"


def cbor(value: CborValue) -> bytes:
    """Encode in canonical CBOR (RFC 7049 §3.9): shortest lengths, definite sizes.

    Only the types that block hashes are made of; a tuple is an array like a list.

    Raises:
        TypeError: The value is of another type (bool and float included).
        ValueError: An integer needs more than 64 bits.
    """
    if value is None:
        return _CBOR_NULL
    if isinstance(value, int) and not isinstance(value, bool):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        payload = value.encode()
        return _cbor_head(3, len(payload)) + payload
    if isinstance(value, (list, tuple)):
        return _cbor_head(4, len(value)) + b"".join(map(cbor, value))
    raise TypeError(f"{value!r} is of type {type(value).__name__}; expected int, bytes, str, list, tuple or None")


def _cbor_head(major: int, argument: int) -> bytes:
    first = major << 5
    if argument < 24:
        return (first | argument).to_bytes(1, "big")
    # The lower five bits of the first byte say how many bytes follow: 24 one, 25 two, 26 four, 27 eight.
    if argument < 1 << 16:
        size, n_bytes = (24, 1) if argument < 1 << 8 else (25, 2)
    elif argument < 1 << 64:
        size, n_bytes = (26, 4) if argument < 1 << 32 else (27, 8)
    else:
        raise ValueError(f"{argument} does not fit 64 bits")
    return ((first | size) << 8 * n_bytes | argument).to_bytes(1 + n_bytes, "big")


def vllm_none_hash(seed: str = "vllm-none-hash") -> bytes:
    """The hash before a sequence's first block, as vLLM derives it for ``sha256_cbor``.

    Args:
        seed: vLLM's fixed seed (checked with 0.32); an engine started with PYTHONHASHSEED set uses
            that variable's text instead.
    """
    return hashlib.sha256(cbor(seed)).digest()


def vllm_block_hashes(
    tokens: TokenIds,
    block_tokens: int,
    *,
    extra_keys: Sequence[tuple[CborValue, ...] | None] | None = None,
    none_hash: bytes | None = None,
) -> list[bytes]:
    """Block hashes of vLLM started with ``--prefix-caching-hash-algo sha256_cbor``.

    ``h[i] = SHA-256(canonical CBOR of (h[i-1], tokens of block i, extra keys of block i or null))``.
    vLLM's default algorithm, ``sha256``, hashes a pickle and is not reproduced.

    Args:
        tokens: Token ids; an incomplete last block has no hash.
        block_tokens: Tokens per block, at least 1.
        extra_keys: Per block, the tuple vLLM adds, such as ``(("lora", name, path),)``,
            ``(("mm", identifier, offset_in_block),)`` or, on the first block only,
            ``(("cache_salt", salt),)``; ``None`` or an empty tuple for none.
        none_hash: Hash before the first block, to continue a chain or for an engine with its own
            seed (:func:`vllm_none_hash`).

    Returns:
        One 32-byte hash per whole block.

    Raises:
        ValueError: A token is invalid, or ``extra_keys`` has another length than there are blocks.
    """
    blocks = _blocks(tokens, block_tokens)
    if extra_keys is not None and len(extra_keys) != len(blocks):
        raise ValueError(f"extra_keys has {len(extra_keys)} entries; expected {len(blocks)}, one per whole block")
    previous = vllm_none_hash() if none_hash is None else none_hash
    # Spelled out, because cbor((previous, ids, keys)) checks the type of each token again.
    head = _cbor_head(4, 3)
    array_head = _cbor_head(4, block_tokens)
    hashes = []
    for index, ids in enumerate(blocks):
        keys = extra_keys[index] if extra_keys is not None else None
        body = b"".join([_cbor_head(0, token) for token in ids])
        previous = hashlib.sha256(head + cbor(previous) + array_head + body + cbor(keys or None)).digest()
        hashes.append(previous)
    return hashes


def vllm_offload_key(block_hash: bytes, group: int = 0) -> bytes:
    """The key under which vLLM offloads a block: its hash and the KV group, u32 big-endian."""
    return block_hash + group.to_bytes(4, "big")


def sglang_page_hashes(tokens: TokenIds, page_tokens: int, *, seed: str | None = None) -> list[str]:
    """Page hashes of SGLang's hierarchical cache.

    ``h[i] = SHA-256(h[i-1], if any, ‖ tokens of page i as u32 little-endian)``.

    Args:
        tokens: Token ids; an incomplete last page has no hash.
        page_tokens: Tokens per page, at least 1.
        seed: Hash before the first page, 64 hex digits: :func:`sglang_namespace_seed`, or the last
            page's hash to continue a chain.

    Returns:
        One hash of 64 hex digits per whole page.

    Raises:
        ValueError: A token is invalid, or ``seed`` is not 64 hex digits.
    """
    previous = b"" if seed is None else bytes.fromhex(seed)
    if seed is not None and len(previous) != DIGEST_BYTES:
        raise ValueError(f"seed has {len(previous)} bytes; expected {DIGEST_BYTES}, as 64 hex digits")
    check_int("page_tokens", page_tokens, 1, MAX_BLOCK_TOKENS)
    page_bytes = page_tokens * TOKEN_ID_BYTES
    ids = token_bytes(tokens, "tokens")
    hashes = []
    for start in range(0, len(ids) - page_bytes + 1, page_bytes):
        previous = hashlib.sha256(previous + ids[start : start + page_bytes]).digest()
        hashes.append(previous.hex())
    return hashes


def sglang_namespace_seed(extra_key: str | None, cache_salt: str | None) -> str | None:
    """The hash before the first page of a request with an extra key (LoRA and the like) or a salt.

    ``SHA-256("sglang-cache-namespace-v1" ‖ part ‖ part)``; an absent part is a zero byte, a present
    one is ``1 ‖ length u64le ‖ UTF-8``.

    Returns:
        64 hex digits, or ``None`` when both are absent.
    """
    if extra_key is None and cache_salt is None:
        return None
    h = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        payload = b"" if part is None else part.encode()
        h.update(b"\0" if part is None else b"\1" + len(payload).to_bytes(8, "little") + payload)
    return h.hexdigest()


def _blocks(tokens: TokenIds, block_tokens: int) -> list[tuple[int, ...]]:
    check_int("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
    ids = token_bytes(tokens, "tokens")
    block_bytes = block_tokens * TOKEN_ID_BYTES
    return list(iter_unpack(f"<{block_tokens}I", memoryview(ids)[: len(ids) // block_bytes * block_bytes]))

"""The public block hash chains of engines, so that their blocks can be addressed from token ids alone.

Give the result to :meth:`kvstore.KVCacheKey.from_block_hashes` with ``chained=True``: each hash commits
to everything before its block.  The chains themselves are in :mod:`kvstore.keys.chains`; here a request is
described as its engine does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.keys import chains
from kvstore.keys.chains import CborValue
from kvstore.keys.digest import MAX_BLOCK_TOKENS, TOKEN_ID_BYTES, check_int
from kvstore.keys.token_ids import TokenIds, token_bytes

ExtraKeys = Iterable[tuple[CborValue, ...]]


def vllm_block_hashes(  # noqa: PLR0913 - each is an identity of its own, as in KVCacheKey.from_tokens
    tokens: TokenIds,
    *,
    block_tokens: int,
    cache_salt: str | None = None,
    lora: tuple[str, str] | None = None,
    extra_keys: Mapping[int, ExtraKeys] | None = None,
    hash_seed: str | None = None,
) -> list[bytes]:
    """Hash the whole blocks of a prompt as vLLM does with ``--prefix-caching-hash-algo sha256_cbor``.

    ``h[i] = sha256(cbor((h[i-1], tokens of block i, extra keys or None)))`` with canonical CBOR, from
    ``h[-1] = sha256(cbor("vllm-none-hash"))``: ``hash_block_tokens`` and ``init_none_hash`` in vLLM's
    ``v1/core/kv_cache_utils.py``, checked against vLLM 0.32.  vLLM's default algorithm, ``sha256``, hashes
    Python pickles and is not reproduced here.

    Args:
        tokens: Token ids of the prompt from its first token on; an incomplete last block is left out.
        block_tokens: Tokens per hash: vLLM's ``block_size`` (``hash_block_size`` for hybrid models).
        cache_salt: The request's ``cache_salt``.
        lora: Name and path of the request's LoRA adapter.
        extra_keys: More of vLLM's tagged extra keys by block number, such as
            ``{0: [("mm", identifier, offset)]}`` or ``{0: [("prompt_embeds", digest)]}``.
        hash_seed: The value of ``PYTHONHASHSEED`` in vLLM's environment, if it is set there.

    Returns:
        One 32-byte hash per whole block.

    Raises:
        ValueError: A token, ``block_tokens`` or a block number of ``extra_keys`` is out of range.
        TypeError: An argument is of another type.
    """
    check_int("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
    n_blocks = len(token_bytes(tokens, "tokens")) // (block_tokens * TOKEN_ID_BYTES)
    for number in extra_keys or ():
        check_int("a block number in extra_keys", number, 0, MAX_BLOCK_TOKENS)
    every = [("lora", *lora)] if lora is not None else []
    keys = []
    for number in range(n_blocks):
        salt = [("cache_salt", cache_salt)] if cache_salt and number == 0 else []
        keys.append(_in_order([*every, *(extra_keys or {}).get(number, ()), *salt]))
    none_hash = None if hash_seed is None else chains.vllm_none_hash(hash_seed)
    return chains.vllm_block_hashes(tokens, block_tokens, extra_keys=keys, none_hash=none_hash)


def sglang_page_hashes(
    tokens: TokenIds, *, page_tokens: int, extra_key: str | None = None, cache_salt: str | None = None
) -> list[str]:
    """Hash the whole pages of a prompt as SGLang's HiCache does.

    ``h[i] = sha256(h[i-1] ‖ tokens of page i as u32 little-endian)``, in hex; the first page follows the
    digest of ``extra_key`` and ``cache_salt`` when there is one: ``get_hash_str`` and
    ``storage_namespace_seed`` in SGLang's ``srt/mem_cache/utils.py``, checked against SGLang 0.5.23.
    Bigram keys (speculative decoding with EAGLE) are not reproduced here.

    Args:
        tokens: Token ids of the prompt from its first token on; an incomplete last page is left out.
        page_tokens: SGLang's ``--page-size``.
        extra_key: The request's ``extra_key`` (LoRA and the like).
        cache_salt: The request's ``cache_salt``.

    Returns:
        64 hexadecimal digits per whole page.

    Raises:
        ValueError: A token or ``page_tokens`` is out of range.
        TypeError: An argument is of another type.
    """
    seed = chains.sglang_namespace_seed(extra_key, cache_salt)
    return chains.sglang_page_hashes(tokens, page_tokens, seed=seed)


def _in_order(keys: Iterable[tuple[CborValue, ...]]) -> tuple[CborValue, ...]:
    """Extra keys of a block as vLLM orders them: LoRA, images and the like, salt, prompt embeddings."""
    return tuple(sorted(map(tuple, keys), key=lambda key: key[:1] == ("prompt_embeds",)))

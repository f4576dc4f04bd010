"""What one page of an SGLang host pool is, as a block spec.

SGLang is not imported: host pools are looked at by their attributes (``HostKVCache`` and its subclasses in
``srt/mem_cache/pool_host``, 0.5.23).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from kvstore.errors import NotSupportedError
from kvstore.spec import DTYPES, BlockSpec

KV: Final = "kv"

# Axes of MHATokenToKVPoolHost.get_data_page(): K and V outermost, then as the layout has it.
_MHA_LAYOUTS: Final = {
    "layer_first": "CLND",
    "page_first": "CNLD",
    "page_first_direct": "CLND",
    "page_head": "CHNLD",
}
# MLATokenToKVPoolHost: one latent per token and layer; the axis of K and V has length 1.
_MLA_LAYOUTS: Final = {"layer_first": "LCND", "page_first": "NCLD", "page_first_direct": "LCND"}


def is_logical(pool: Any) -> bool:
    """Whether the pool only hands out page numbers and has no bytes (the anchor of some hybrid models)."""
    return getattr(pool, "kv_buffer", pool) is None


def indices_per_page(pool: Any) -> int:
    """How many host indices stand for one page."""
    return int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)


def page_spec(pool: Any, name: str, *, block_tokens: int) -> BlockSpec:
    """Describe the pages of a pool: by shape and dtype where they are known, else as bytes with a tag.

    Args:
        pool: A host pool of SGLang.
        name: Its name, such as ``"kv"`` or ``"mamba"``.
        block_tokens: Tokens that a page hash stands for.

    Raises:
        NotSupportedError: The pool has no pages that could be stored.
    """
    if getattr(pool, "shard_size", 1) > 1:
        msg = (
            f"host pool {name!r} ({type(pool).__name__}) spreads its pages over {pool.shard_size} ranks, so no rank "
            "has a whole prefix to store; turn KV page interleaving off to use a storage backend"
        )
        raise NotSupportedError(msg)
    nbytes = page_nbytes(pool, name)
    dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    layout = str(getattr(pool, "layout", ""))
    if name == KV and dtype in DTYPES and getattr(pool, "page_size", None) == block_tokens:
        spec = _mha_spec(pool, dtype, layout, block_tokens) or _mla_spec(pool, dtype, layout, block_tokens)
        if spec is not None and spec.nbytes == nbytes:
            return spec
    layers = getattr(pool, "layer_num", "")
    tag = f"sglang/{name}/{type(pool).__name__}/{layout}/{dtype}/layers={layers}/page={indices_per_page(pool)}"
    return BlockSpec.opaque(nbytes, block_tokens=block_tokens, tag=tag)


def is_addressed(pool: Any) -> bool:
    """Whether a page lies in one or a few pieces, in the order in which flat pages have them.

    So it is in every page-first layout; ``layer_first`` has a piece per layer, K and V in turns, while its
    flat pages begin with all of K.
    """
    return str(getattr(pool, "layout", "")).startswith("page_")


def page_nbytes(pool: Any, name: str) -> int:
    """Bytes of one page.

    Raises:
        NotSupportedError: The pool gives neither addresses of pages nor flat ones.
    """
    sizes = _piece_sizes(pool)
    if sizes is not None:
        return sum(map(int, sizes))
    try:
        pool.get_data_page(0, flat=True)
        return int(pool.get_dummy_flat_data_page().nbytes)
    except (NotImplementedError, ValueError) as e:
        msg = (
            f"host pool {name!r} ({type(pool).__name__}, layout {getattr(pool, 'layout', None)!r}) has no pages that a "
            f"storage backend can use: {e}"
        )
        raise NotSupportedError(msg) from e


def _piece_sizes(pool: Any) -> list[int] | None:
    if getattr(pool, "stores_page_envelope", False):  # would look the page up among those in use
        return [pool.get_page_buffer_element_size()]
    if not is_addressed(pool):
        return None
    try:
        meta = pool.get_page_buffer_meta(torch.arange(indices_per_page(pool)))
    except (NotImplementedError, ValueError):
        return None
    return None if meta is None else list(meta[1])


def _mha_spec(pool: Any, dtype: str, layout: str, tokens: int) -> BlockSpec | None:
    heads, head_dim, layers = (getattr(pool, name, None) for name in ("head_num", "head_dim", "layer_num"))
    if layout not in _MHA_LAYOUTS or not (heads and head_dim and layers):
        return None
    if getattr(pool, "v_head_dim", head_dim) != head_dim:
        return None
    return BlockSpec(layers, heads, head_dim, tokens, dtype, _MHA_LAYOUTS[layout])


def _mla_spec(pool: Any, dtype: str, layout: str, tokens: int) -> BlockSpec | None:
    width, layers = getattr(pool, "kv_cache_dim", None), getattr(pool, "layer_num", None)
    if layout not in _MLA_LAYOUTS or not (width and layers):
        return None
    return BlockSpec(layers, 1, width, tokens, dtype, _MLA_LAYOUTS[layout], kv=1)

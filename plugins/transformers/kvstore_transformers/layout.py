"""Between the model's cache and blocks: K/V of one prompt in either shape, same bytes.

The model keeps a tensor ``[1, heads, tokens, head_dim]`` of keys and one of values per layer; a block
is ``[layers, 2, tokens, heads, head_dim]`` (LCND).  Either way every byte is copied once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.spec import BlockSpec, dtype_name
from kvstore_transformers.support import dynamic_layers

if TYPE_CHECKING:
    from transformers import DynamicCache


def spec_of_cache(cache: DynamicCache, block_tokens: int) -> BlockSpec:
    """Read the block spec off a cache that a forward pass has filled.

    Read from the tensors and not from the model's config: there the fields differ between
    architectures, and what counts is what the model really caches.

    Raises:
        NotImplementedError: Layers differ in shape or dtype, or keys differ from values.
        ValueError: ``block_tokens`` is out of range, or the dtype cannot be stored.
    """
    layers = dynamic_layers(cache)
    first = layers[0].keys
    if first is None:
        msg = "layer 0 of the model cache holds no K/V; only full attention in every layer is supported"
        raise NotImplementedError(msg)
    for i, layer in enumerate(layers):
        for what, tensor in (("keys", layer.keys), ("values", layer.values)):
            if tensor is None or tensor.shape != first.shape or tensor.dtype != first.dtype:
                found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                msg = (
                    f"{what} of layer {i} are {found} and keys of layer 0 {tuple(first.shape)} {first.dtype}; "
                    f"only models whose layers all cache K and V of one shape are supported"
                )
                raise NotImplementedError(msg)
    _, heads, _, head_dim = first.shape
    return BlockSpec(len(layers), heads, head_dim, block_tokens, dtype_name(first.dtype))


def blocks_of_cache(cache: DynamicCache, spec: BlockSpec, first_block: int, n_blocks: int) -> torch.Tensor:
    """Copy whole blocks out of the model's cache.

    Args:
        cache: Holds at least ``(first_block + n_blocks) * spec.block_tokens`` tokens of one sequence.
        spec: From :func:`spec_of_cache`.
        first_block: Index of the first block to copy.
        n_blocks: How many.

    Returns:
        (n_blocks, *spec.shape) spec.dtype, contiguous, on the host.
    """
    blocks = torch.empty((n_blocks, *spec.shape), dtype=spec.torch_dtype())
    tokens = slice(first_block * spec.block_tokens, (first_block + n_blocks) * spec.block_tokens)
    for i, layer in enumerate(dynamic_layers(cache)):
        for kv, tensor in enumerate((layer.keys, layer.values)):
            if tensor is None:
                msg = f"layer {i} of the model cache is empty; run the model first"
                raise ValueError(msg)
            # [heads, tokens, dim] seen as [n_blocks, block_tokens, heads, dim]
            pieces = tensor[0, :, tokens].reshape(spec.kv_heads, n_blocks, spec.block_tokens, spec.head_dim)
            blocks[:, i, kv].copy_(pieces.permute(1, 2, 0, 3))
    return blocks


def room_for_blocks(spec: BlockSpec, n_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate memory in the model's order, and see it as blocks.

    Blocks written into the second tensor land where attention wants them, so that restoring needs
    no staging copy and no transposition afterwards.

    Returns:
        ``(layers, 2, heads, n_blocks * block_tokens, head_dim)``, uninitialised and contiguous, and
        a view of it as ``(n_blocks, *spec.shape)``.
    """
    size = (spec.layers, spec.kv, spec.kv_heads, n_blocks, spec.block_tokens, spec.head_dim)
    room = torch.empty(size, dtype=spec.torch_dtype())
    return room.flatten(3, 4), room.permute(3, 0, 1, 4, 2, 5)


def fill_cache(cache: DynamicCache, restored: torch.Tensor) -> None:
    """Make an empty cache hold restored K/V, without copying them.

    Args:
        cache: Empty; afterwards its layers share memory with ``restored`` until the next forward
            pass appends to them.
        restored: (layers, 2, heads, n_tokens, head_dim) on the model's device.
    """
    for layer, (keys, values) in zip(dynamic_layers(cache), restored.unsqueeze(2), strict=True):
        # An update by no tokens initialises a layer in every 5.x version; it would copy real ones.
        layer.update(keys[..., :0, :], values[..., :0, :])
        layer.keys, layer.values = keys, values

"""LMCache's memory objects and keys, in the terms of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore_lmcache.layout import ChunkLayout
from kvstore_lmcache.names import ChunkName

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.distributed.api import ObjectKey


def name_of_key(key: CacheEngineKey) -> ChunkName:
    """The name of a chunk, or of one layer of it, in the in-process engine."""
    part: tuple[int | str, ...] = (key.world_size, key.worker_id, str(key.dtype).removeprefix("torch."))
    layer = getattr(key, "layer_id", None)
    if layer is not None:
        part = (*part, f"layer {layer}")
    tags = None if not key.tags else repr(key.tags)
    return ChunkName(chunk_hash=key.chunk_hash, model=key.model_name, part=part, salt=tags)


def name_of_object(key: ObjectKey) -> ChunkName:
    """The name of an object in LMCache's server."""
    return ChunkName(
        chunk_hash=key.chunk_hash,
        model=key.model_name,
        part=(key.kv_rank,),
        salt=key.cache_salt or None,
        group=key.object_group_id,
    )


def bytes_of(memory: Any) -> torch.Tensor:
    """The logical bytes of a memory object as a flat ``uint8`` view, without a copy.

    Raises:
        ValueError: The object has no tensor, or is not valid any more.
    """
    raw = memory.raw_tensor
    if not isinstance(raw, torch.Tensor):
        raise ValueError(f"{type(memory).__name__} has no tensor")  # noqa: TRY004 - the object's state, not its type
    return raw.view(-1).view(torch.uint8)[: memory.get_size()]


def layout_of(memory: Any) -> ChunkLayout:
    """Shapes, dtypes and format of a memory object."""
    meta = memory.metadata
    fmt = meta.fmt.name
    if meta.shapes and meta.dtypes:
        layout = ChunkLayout.of(meta.shapes, meta.dtypes, fmt)
    else:
        layout = ChunkLayout.of([meta.shape], [meta.dtype], fmt)
    if layout.nbytes != memory.get_size():  # narrowed to the bytes in use
        layout = ChunkLayout((("uint8", (memory.get_size(),)),), fmt)
    return layout

"""What blocks look like, as AIBrix describes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvstore.compat.aibrix.environment import block_tokens_override

if TYPE_CHECKING:
    import torch


class KVCacheBlockLayout(Enum):
    """Order of a block's axes, outermost first: L layers, C key/value, N tokens, D heads and elements."""

    NCLD = auto()
    LCND = auto()


@dataclass
class KVCacheTensorSpec:
    """Which part of the model a block holds.

    Attributes:
        heads: Ids of its KV heads: a rank's share under tensor parallelism.
        layers: Ids of its layers: a rank's share under pipeline parallelism.
        head_size: Elements per head.

    Raises:
        ValueError: There is no head or layer, or ``head_size`` is below 1.
    """

    heads: Sequence[int]
    layers: Sequence[int]
    head_size: int

    def __post_init__(self) -> None:
        for name in ("heads", "layers"):
            if not len(getattr(self, name)):
                msg = f"KVCacheTensorSpec.{name} is empty; expected at least one id"
                raise ValueError(msg)
        _check_positive("KVCacheTensorSpec.head_size", self.head_size)


@dataclass
class KVCacheBlockSpec:
    """Shape and dtype of a block.

    ``AIBRIX_KV_CACHE_OL_BLOCK_SIZE`` replaces ``block_ntokens``, for cache blocks that are larger
    than the engine's.

    Attributes:
        block_ntokens: Tokens per block.
        block_dtype: A torch dtype.
        block_layout: Order of the axes.
        tensor_spec: Layers and heads.
        engine_block_ntokens: ``block_ntokens`` as it was given.
        block_nbytes: Bytes of a block; ``engine_block_nbytes`` likewise for the engine's.
        block_shape: Shape of a block as a tensor; ``engine_block_shape`` likewise.
        block_shape_token_dim: Which axis of the shape is the tokens.

    Raises:
        ValueError: ``block_ntokens`` is below 1, or the variable is no power of two.
    """

    block_ntokens: int
    block_dtype: torch.dtype
    block_layout: KVCacheBlockLayout
    tensor_spec: KVCacheTensorSpec
    engine_block_ntokens: int = field(init=False, repr=False)
    engine_block_nbytes: int = field(init=False, repr=False)
    engine_block_shape: tuple[int, ...] = field(init=False, repr=False)
    block_nbytes: int = field(init=False, repr=False)
    block_shape: tuple[int, ...] = field(init=False, repr=False)
    block_shape_token_dim: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_positive("KVCacheBlockSpec.block_ntokens", self.block_ntokens)
        self.engine_block_ntokens = self.block_ntokens
        self.block_ntokens = block_tokens_override(os.environ) or self.block_ntokens
        self.block_shape = self._shape(self.block_ntokens)
        self.engine_block_shape = self._shape(self.engine_block_ntokens)
        token_bytes = self._token_elements() * self.block_dtype.itemsize
        self.block_nbytes = self.block_ntokens * token_bytes
        self.engine_block_nbytes = self.engine_block_ntokens * token_bytes
        self.block_shape_token_dim = 0 if self.block_layout is KVCacheBlockLayout.NCLD else 2

    @property
    def signature(self) -> str:
        """Layout and block size as text."""
        return f"{self.block_layout.name.lower()}{self.block_ntokens}"

    def _token_elements(self) -> int:
        tensor = self.tensor_spec
        return 2 * len(tensor.layers) * len(tensor.heads) * tensor.head_size

    def _shape(self, n_tokens: int) -> tuple[int, ...]:
        tensor = self.tensor_spec
        n_layers, per_layer = len(tensor.layers), (len(tensor.heads), tensor.head_size)
        if self.block_layout is KVCacheBlockLayout.NCLD:
            return (n_tokens, 2, n_layers, *per_layer)
        return (n_layers, 2, n_tokens, *per_layer)


@dataclass
class ModelSpec:
    """What the engine runs.

    Attributes:
        max_model_len: Longest sequence in tokens; not used here.
        max_num_batched_tokens: Tokens per step; not used here.

    Raises:
        ValueError: ``max_model_len`` is below 1.
    """

    max_model_len: int
    max_num_batched_tokens: int = -1

    def __post_init__(self) -> None:
        _check_positive("ModelSpec.max_model_len", self.max_model_len)


@dataclass
class KVCacheConfig:
    """What a cache is made from.

    Attributes:
        block_spec: Shape and dtype of the blocks.
        model_spec: What the engine runs.
        multi_threaded: Not used here: every call may come from any thread.
    """

    block_spec: KVCacheBlockSpec
    model_spec: ModelSpec
    multi_threaded: bool = False


@dataclass
class KVCacheFeature:
    """GPUDirect support, which is not offered: both are False."""

    gdr_put: bool = False
    gdr_get: bool = False


def _check_positive(name: str, value: int) -> None:
    if value <= 0:
        msg = f"{name} is {value}; expected at least 1"
        raise ValueError(msg)

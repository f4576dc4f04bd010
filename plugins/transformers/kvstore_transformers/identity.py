"""What a model's K/V are called in the store: block spec and namespace."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from kvstore.namespace import Namespace
from kvstore.spec import BlockSpec
from kvstore_transformers.fingerprint import ModelFingerprint, fingerprint_model
from kvstore_transformers.forward import Forward
from kvstore_transformers.layout import spec_of_cache
from kvstore_transformers.support import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything that decides whether stored K/V fit a model.

    Attributes:
        spec: Shape, dtype and layout of a block.
        namespace: Model class, weights fingerprint and config fingerprint.
        fingerprint: The fingerprint itself and what it cost.
    """

    spec: BlockSpec
    namespace: Namespace
    fingerprint: ModelFingerprint


def identify_model(model: PreTrainedModel, *, block_tokens: int = 16) -> ModelIdentity:
    """Name a model's K/V by what they hold: the same on every host, whoever wrote them.

    Dtype and shape are part of it through the spec.  The attention implementation, the device and
    the versions of torch and transformers are not: they move the last bits of K/V, as two runs on
    different machines do, and not their meaning.  Runs one token through the model.

    Args:
        model: Decoder-only causal language model in evaluation mode.
        block_tokens: Tokens per block, at least 1.

    Raises:
        NotImplementedError: The model's KV cache cannot be stored exactly; the message says why.
        ValueError: Training mode, weights without data, or ``block_tokens`` out of range.
    """
    check_model(model)
    forward = Forward(model)
    # One token shows what the model really caches; its K/V are thrown away.
    probe = forward.new_cache()
    forward.run(torch.zeros((1, 1), dtype=torch.int64), probe)
    spec = spec_of_cache(probe, block_tokens)
    fingerprint = fingerprint_model(model)
    namespace = Namespace(
        model=type(model).__name__,
        revision=fingerprint.weights,
        text_config=fingerprint.text_config,
        engine="transformers",
        engine_version=version("transformers"),
    )
    return ModelIdentity(spec, namespace, fingerprint)

"""What can be cached: every refusal of the connector, with its reason, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel
    from transformers.cache_utils import DynamicLayer

# RoPE variants whose frequencies depend on how long the prompt is: the K of a prefix then depends on
# what follows it, so a prefix computed for one prompt is wrong for another.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")

# generate() options that need a cache other than one sequence in a DynamicCache.
_SINGLE_SEQUENCE: Final = ("num_beams", "num_return_sequences")
_OTHER_CACHE: Final = ("cache_implementation", "assistant_model", "prompt_lookup_num_tokens")
# generate() arguments that CachedModel makes itself, or that change K/V behind the token ids.
_OWN_ARGUMENTS: Final = ("input_ids", "inputs", "past_key_values", "cache", "use_cache")
_BEYOND_TOKEN_IDS: Final = ("inputs_embeds", "position_ids", "token_type_ids", "pixel_values", "input_features")


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose KV cache cannot be stored and restored exactly.

    Raises:
        NotImplementedError: Encoder-decoder models, models spread over several devices, RoPE that
            depends on the prompt length.
        ValueError: The model is in training mode (dropout would make K/V random).
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder or not model.can_generate():
        msg = f"{name} is not a decoder-only causal language model; only those are supported (AutoModelForCausalLM)"
        raise NotImplementedError(msg)
    if model.training:
        msg = f"{name} is in training mode, where dropout makes K/V random; call model.eval() first"
        raise ValueError(msg)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        msg = f"{name} is spread over {len(devices)} devices ({sorted(map(str, devices))}); load it on one device"
        raise NotImplementedError(msg)
    rope_type = _rope_type(model.config.get_text_config(decoder=True))
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        msg = (
            f"{name} uses RoPE type {rope_type!r}, whose frequencies depend on the length of the whole prompt: "
            f"the K/V of a prefix cannot be reused under another prompt"
        )
        raise NotImplementedError(msg)


def dynamic_layers(cache: DynamicCache) -> list[DynamicLayer]:
    """The layers of a model cache, all of which must be plain full attention.

    Raises:
        NotImplementedError: Another cache class, or a layer of another type (sliding window, linear
            attention, static, quantized, shared), named with its index.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        kind = f"{type(cache).__name__}{' with offloading' if getattr(cache, 'offloading', False) else ''}"
        msg = f"the model cache is a {kind}; only a DynamicCache without offloading is supported"
        raise NotImplementedError(msg)
    layers = []
    for i, layer in enumerate(cache.layers):
        # Exactly this class: its subclasses keep less than every token, or something besides K and V.
        if type(layer) is not DynamicLayer:
            kind = type(layer).__name__
            msg = f"layer {i} of the model cache is a {kind}; only DynamicLayer (full attention) is supported"
            raise NotImplementedError(msg)
        layers.append(layer)
    return layers


def check_generate_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of ``generate`` that do not go with a restored cache of one sequence.

    Raises:
        ValueError: An argument that the connector makes itself, K/V that token ids do not
            determine, or several sequences at once.
        NotImplementedError: Another cache class, or assisted decoding.
    """
    for name in _OWN_ARGUMENTS:
        if name in arguments:
            msg = f"generate() got {name!r}, which the connector sets itself; pass the prompt as the first argument"
            raise ValueError(msg)
    for name in _BEYOND_TOKEN_IDS:
        if arguments.get(name) is not None:
            msg = (
                f"generate() got {name!r}: K/V would no longer follow from the token ids; only token ids are supported"
            )
            raise ValueError(msg)
    mask = arguments.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        msg = "attention_mask hides tokens of the prompt; pass one prompt without padding"
        raise ValueError(msg)
    config = arguments.get("generation_config") or model.generation_config
    for name in _SINGLE_SEQUENCE:
        value = arguments.get(name, getattr(config, name, None))
        if value is not None and value > 1:
            msg = f"{name} is {value}; only one sequence is supported (batch size 1)"
            raise ValueError(msg)
    for name in _OTHER_CACHE:
        value = arguments.get(name, getattr(config, name, None))
        if value not in (None, "dynamic"):
            msg = f"{name}={value!r} needs another cache than a DynamicCache of one sequence; leave it out"
            raise NotImplementedError(msg)


def check_prompt(input_ids: torch.Tensor) -> None:
    """Refuse anything but one prompt of token ids.

    Raises:
        ValueError: Not an integer tensor of shape ``(1, n_tokens)`` with at least one token.
    """
    dtype = getattr(input_ids, "dtype", None)
    if dtype not in (torch.int64, torch.int32):
        found = dtype or type(input_ids).__name__
        msg = f"input_ids is {found}; expected an integer tensor of shape (1, n_tokens)"
        raise ValueError(msg)
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        msg = (
            f"input_ids has shape {tuple(input_ids.shape)}; expected (1, n_tokens): one prompt without padding "
            f"(only batch size 1 is supported, call once per prompt)"
        )
        raise ValueError(msg)


def check_adapter(model: PreTrainedModel, adapter: str | None) -> None:
    """Refuse a model with weight adapters unless the caller says which one is active.

    Raises:
        ValueError: PEFT adapters are loaded and ``adapter`` is None.
    """
    has_adapters = getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None)
    if has_adapters and adapter is None:
        msg = (
            f"{type(model).__name__} has PEFT adapters loaded, which change K/V; "
            f"pass adapter='name@revision' of the active one (or 'none' when all are disabled)"
        )
        raise ValueError(msg)


def _rope_type(text_config: Any) -> str | None:
    parameters = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    value = parameters.get("rope_type", parameters.get("type"))
    return None if value is None else str(value)

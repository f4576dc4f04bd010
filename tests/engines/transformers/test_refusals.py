"""What cannot be cached exactly is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from kvstore_transformers import identify_model, open_cache
from kvstore_transformers.forward import Forward
from kvstore_transformers.support import dynamic_layers

Build = Callable[..., Any]
Prompt = Callable[..., torch.Tensor]

CONFIG = {"l1": {"capacity": "1MiB"}}


def test_sliding_window_layers_are_refused_by_name() -> None:
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, sliding_window=8,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).train(mode=False)

    with pytest.raises(NotImplementedError, match="layer 0 of the model cache is a DynamicSlidingWindowLayer"):
        identify_model(model)


def test_static_cache_is_refused_by_name(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="the model cache is a StaticCache"):
        dynamic_layers(transformers.StaticCache(config=model.config, max_cache_len=8))  # type: ignore[arg-type]


def test_offloaded_cache_is_refused(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="DynamicCache with offloading"):
        dynamic_layers(transformers.DynamicCache(config=model.config, offloading=True))


def test_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)

    with pytest.raises(NotImplementedError, match="not a decoder-only causal language model"):
        identify_model(transformers.T5ForConditionalGeneration(config).train(mode=False))


def test_training_mode_is_refused(build_model: Build) -> None:
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        identify_model(build_model().train())


def test_rope_that_depends_on_the_prompt_length_is_refused(build_model: Build) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

    with pytest.raises(NotImplementedError, match="RoPE type 'dynamic'"):
        identify_model(build_model(rope_parameters=rope))


def test_model_spread_over_devices_is_refused(build_model: Build) -> None:
    model = build_model()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}

    with pytest.raises(NotImplementedError, match="spread over 2 devices"):
        identify_model(model)


def test_active_adapters_need_a_name(build_model: Build) -> None:
    model = build_model()
    model._hf_peft_config_loaded = True

    with pytest.raises(ValueError, match="adapter='name@revision'"):
        open_cache(model, CONFIG)


@pytest.mark.parametrize("ids", [torch.zeros((2, 8), dtype=torch.int64), torch.zeros(8, dtype=torch.int64)])
def test_batches_are_refused(model: Any, ids: torch.Tensor) -> None:
    with open_cache(model, CONFIG) as cached, pytest.raises(ValueError, match="only batch size 1"):
        cached.prefill(ids)


def test_empty_prompt_is_refused(model: Any) -> None:
    with open_cache(model, CONFIG) as cached, pytest.raises(ValueError, match=r"shape \(1, 0\)"):
        cached.prefill(torch.zeros((1, 0), dtype=torch.int64))


def test_prompt_that_is_no_integer_tensor_is_refused(model: Any) -> None:
    with open_cache(model, CONFIG) as cached:
        with pytest.raises(ValueError, match=r"input_ids is torch\.float32"):
            cached.prefill(torch.zeros((1, 8)))
        with pytest.raises(ValueError, match="input_ids is list"):
            cached.prefill([[1, 2, 3]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_beams": 2}, ValueError, "num_beams is 2"),
        ({"num_return_sequences": 3, "do_sample": True}, ValueError, "num_return_sequences is 3"),
        ({"cache_implementation": "static"}, NotImplementedError, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, NotImplementedError, "cache_implementation='quantized'"),
        ({"prompt_lookup_num_tokens": 2}, NotImplementedError, "prompt_lookup_num_tokens=2"),
        ({"past_key_values": None}, ValueError, "sets itself"),
        ({"use_cache": False}, ValueError, "sets itself"),
        ({"inputs_embeds": torch.zeros((1, 8, 32))}, ValueError, "inputs_embeds"),
        ({"position_ids": torch.arange(8)[None]}, ValueError, "position_ids"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, ValueError, "without padding"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_generate_that_need_another_cache_are_refused(
    model: Any, make_prompt: Prompt, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with open_cache(model, CONFIG) as cached, pytest.raises(error, match=message):
        cached.generate(make_prompt(4), max_new_tokens=1, **arguments)


def test_beams_in_the_generation_config_are_refused_too(model: Any, make_prompt: Prompt) -> None:
    config = transformers.GenerationConfig(num_beams=4)  # type: ignore[no-untyped-call]

    with open_cache(model, CONFIG) as cached, pytest.raises(ValueError, match="num_beams is 4"):
        cached.generate(make_prompt(4), generation_config=config)


def test_model_switched_to_training_later_is_refused(build_model: Build, make_prompt: Prompt) -> None:
    model = build_model()
    with open_cache(model, CONFIG) as cached:
        model.train()
        with pytest.raises(ValueError, match="training mode"):
            cached.prefill(make_prompt(20))


def test_new_cache_has_one_layer_per_model_layer(model: Any) -> None:
    assert len(dynamic_layers(Forward(model).new_cache())) == 2

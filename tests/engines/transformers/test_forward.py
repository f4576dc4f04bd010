"""Calls of the model: pieces of a prompt add up, whatever the cache argument is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from kvstore_transformers.forward import Forward

Prompt = Callable[..., torch.Tensor]


class OlderLlama(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]  # a hook of transformers
    """The signature of models up to transformers 5.2x, without a way to ask for the last logits only."""

    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: Any = None) -> Any:
        name = "cache" if "cache" in transformers.LlamaForCausalLM.forward.__annotations__ else "past_key_values"
        arguments: Any = {name: past_key_values, "use_cache": use_cache}
        return super().forward(input_ids=input_ids, **arguments)


def test_logits_are_those_of_the_last_token(model: Any, make_prompt: Prompt) -> None:
    ids = make_prompt(20)
    forward = Forward(model)

    logits = forward.run(ids, forward.new_cache())

    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1]
    assert torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))


def test_cache_grows_by_each_piece(model: Any, make_prompt: Prompt) -> None:
    ids = make_prompt(20)
    forward = Forward(model)
    cache = forward.new_cache()

    forward.run(ids[:, :16], cache)
    assert cache.get_seq_length() == 16
    forward.run(ids[:, 16:], cache)
    assert cache.get_seq_length() == 20


def test_older_name_of_the_cache_argument_works_too(model: Any, make_prompt: Prompt) -> None:
    kind: Any = OlderLlama
    older = kind(model.config).to(torch.bfloat16)
    older.load_state_dict(model.state_dict())
    forward, current = Forward(older.eval()), Forward(model)
    cache = forward.new_cache()
    forward.run(make_prompt(16), cache)

    logits = forward.run(make_prompt(3), cache)

    assert forward.cache_argument == "past_key_values"
    assert cache.get_seq_length() == 19
    expected_cache = current.new_cache()
    current.run(make_prompt(16), expected_cache)
    assert torch.equal(logits.view(torch.uint8), current.run(make_prompt(3), expected_cache).view(torch.uint8))

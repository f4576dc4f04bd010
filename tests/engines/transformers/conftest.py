from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the transformers extra is not installed")

VOCABULARY = 64


def make_model(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    """A two-layer Llama with random weights: a real model of the real library, in milliseconds."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | config)))
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="session")
def build_model() -> Callable[..., Any]:
    return make_model


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity_warning()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads on matrices of this size only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def prompt(n_tokens: int, seed: int = 1) -> torch.Tensor:
    """(1, n_tokens) random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (1, n_tokens), generator=generator)


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., torch.Tensor]:
    return prompt

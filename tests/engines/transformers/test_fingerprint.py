"""Equal models have equal fingerprints everywhere, different ones differ."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_transformers import fingerprint_model, identify_model

from kvstore.fingerprint import fingerprint_config

Build = Callable[..., Any]


def test_equal_weights_are_one_model(build_model: Build) -> None:
    first, second = fingerprint_model(build_model()), fingerprint_model(build_model())

    assert (first.weights, first.text_config) == (second.weights, second.text_config)


def test_another_process_agrees(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM; from kvstore_transformers import identify_model;"
        "i = identify_model(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16));"
        "print(i.namespace.digest(i.spec).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "HF_HUB_OFFLINE": "1"}

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )

    identity = identify_model(model)
    assert done.stdout.strip() == identity.namespace.digest(identity.spec).hex()


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_changed_tensor_is_another_model(build_model: Build, name: str) -> None:
    model = build_model()
    before = fingerprint_model(model).weights
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01)

    assert fingerprint_model(model).weights != before


def test_small_perturbation_of_a_large_tensor_is_another_model(build_model: Build) -> None:
    """A tensor that is sampled and not read whole."""
    model = build_model(dtype=torch.float32, vocab_size=8192)
    before = fingerprint_model(model)
    weight = model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        weight.add_(1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))

    assert weight.nbytes > 10 * before.sampled_bytes / len(model.state_dict())
    assert fingerprint_model(model).weights != before.weights


def test_strides_do_not_matter(build_model: Build) -> None:
    model = build_model(vocab_size=512)
    before = fingerprint_model(model).weights
    parameter = model.get_parameter("model.embed_tokens.weight")
    parameter.data = parameter.data.t().contiguous().t()

    assert not parameter.is_contiguous()
    assert fingerprint_model(model).weights == before


def test_sample_is_a_small_part_of_the_weights(build_model: Build) -> None:
    model = build_model(hidden_size=256, intermediate_size=1024, vocab_size=4096)

    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert 0 < fingerprint_model(model).sampled_bytes < total / 20


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_config_that_changes_kv_is_another_model(model: Any, build_model: Build, change: dict[str, Any]) -> None:
    assert fingerprint_model(build_model(**change)).text_config != fingerprint_model(model).text_config


def test_unknown_config_field_counts() -> None:
    assert fingerprint_config({"hidden_size": 32, "new_trick": True}) != fingerprint_config({"hidden_size": 32})


@pytest.mark.parametrize("field", ["_name_or_path", "transformers_version", "eos_token_id", "use_cache"])
def test_who_saved_it_and_how_text_is_made_does_not_count(field: str) -> None:
    assert fingerprint_config({"hidden_size": 32, field: "x"}) == fingerprint_config({"hidden_size": 32})


def test_dtype_is_part_of_the_identity(build_model: Build) -> None:
    identities = [identify_model(build_model(dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]

    assert identities[0].spec.dtype != identities[1].spec.dtype
    assert len({identity.namespace.digest(identity.spec) for identity in identities}) == 2


def test_weights_without_data_are_refused(build_model: Build) -> None:
    model = build_model().to("meta")

    with pytest.raises(ValueError, match="has no data"):
        fingerprint_model(model)

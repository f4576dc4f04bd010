"""Two engines share blocks exactly when weights, configuration and bytes are the same."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_vllm.identity import check_hash_algorithm, hash_caution, identify_model, namespace_of
from kvstore_vllm.options import EngineOptions

from kvstore import BlockSpec, ConfigError
from tests.unit.vllm.support import TEXT_CONFIG, vllm_config

SPEC = BlockSpec.opaque(64, block_tokens=16, tag="rows")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def digest(config: Any, **options: Any) -> bytes:
    identity = identify_model(config, EngineOptions(**{"revision": "r", **options}))
    return namespace_of(identity, engine_layout="rows", vllm_config=config).digest(SPEC)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_a_local_folder_is_the_same_wherever_it_lies(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "under another name"
    shutil.copytree(weights, copy)
    here, there = (identify_model(vllm_config(str(folder)), EngineOptions()) for folder in (weights, copy))
    assert here == there
    assert here.revision is not None
    assert not here.cautions


def test_other_weights_in_the_same_folder_are_another_revision(weights: Path) -> None:
    before = identify_model(vllm_config(str(weights)), EngineOptions())
    (weights / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 64)
    assert identify_model(vllm_config(str(weights)), EngineOptions()).revision != before.revision


def test_a_single_weight_file_is_named_by_its_content(tmp_path: Path) -> None:
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for file in files:
        file.write_bytes(b"weights" * 100)
    first, second = (identify_model(vllm_config(str(file)), EngineOptions()) for file in files)
    assert first == second
    files[1].write_bytes(b"Weights" * 100)
    assert identify_model(vllm_config(str(files[1])), EngineOptions()).revision != first.revision


def test_a_snapshot_folder_is_its_repository_and_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    identity = identify_model(vllm_config(str(folder)), EngineOptions())
    assert (identity.model, identity.revision) == ("org/model", COMMIT)


def test_a_snapshot_folder_shares_with_the_repository_it_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    by_folder = identify_model(vllm_config(str(folder)), EngineOptions())
    by_name = identify_model(vllm_config("org/model", revision=COMMIT), EngineOptions())
    assert by_folder == by_name


@pytest.mark.parametrize("source", ["loaded config", "local cache"])
def test_the_commit_of_a_repository_is_found_without_being_asked_for(source: str, tmp_path: Path) -> None:
    config = vllm_config()
    if source == "loaded config":
        config.model_config.hf_config._commit_hash = COMMIT
    else:
        refs = tmp_path / "hf" / "hub" / "models--org--model" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(f"{COMMIT}\n")
    assert identify_model(config, EngineOptions()).revision == COMMIT


def test_weights_that_cannot_be_identified_are_used_with_a_caution() -> None:
    identity = identify_model(vllm_config(), EngineOptions())
    assert identity.revision is None
    assert any("'revision'" in caution for caution in identity.cautions)


def test_an_empty_folder_is_used_with_a_caution(tmp_path: Path) -> None:
    identity = identify_model(vllm_config(str(tmp_path)), EngineOptions())
    assert identity.revision is None
    assert any("not identified" in caution for caution in identity.cautions)


def test_a_new_weights_version_is_a_new_revision() -> None:
    versions = {digest(vllm_config(), weights_version=version) for version in (None, "1", "2")}
    assert len(versions) == 3
    assert identify_model(vllm_config(), EngineOptions(weights_version="7")).revision == "weights 7"


@pytest.mark.parametrize(
    "changes",
    [
        {"text": {"hidden_size": 256}},
        {"text": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
    ],
    ids=str,
)
def test_what_changes_kv_separates(changes: dict[str, Any]) -> None:
    assert digest(vllm_config(**changes)) != digest(vllm_config())


@pytest.mark.parametrize(
    "changes",
    [
        {"text": {"_name_or_path": "elsewhere", "transformers_version": "6.0"}},
        {"max_model_len": 8192},
        {"rank": 3, "world_size": 8},
    ],
    ids=str,
)
def test_what_does_not_change_kv_does_not_separate(changes: dict[str, Any]) -> None:
    assert digest(vllm_config(**changes)) == digest(vllm_config())


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic", "unheard of"])
def test_the_longest_context_separates_where_rope_depends_on_it(rope_type: str) -> None:
    text = {"rope_parameters": {"full_attention": {"rope_type": rope_type}, "sliding_attention": {"rope_theta": 1.0}}}
    assert digest(vllm_config(text=text, max_model_len=4096)) != digest(vllm_config(text=text, max_model_len=8192))


def test_a_text_config_that_the_user_names_replaces_the_fingerprint() -> None:
    assert digest(vllm_config(text={"hidden_size": 1}), text_config="t") == digest(vllm_config(), text_config="t")


def test_a_config_that_is_a_mapping_is_read_as_one() -> None:
    config = vllm_config()
    config.model_config.hf_text_config = dict(TEXT_CONFIG)
    assert digest(config) == digest(vllm_config())


class TestScaledKV:
    def test_static_scales_are_part_of_the_weights(self) -> None:
        identity = identify_model(vllm_config(cache_dtype="fp8_e4m3"), EngineOptions(revision="r"))
        assert (identity.kv_scales, identity.kv_dtype) == ("checkpoint", "fp8_e4m3")

    def test_scales_computed_at_start_are_refused(self) -> None:
        config = vllm_config(cache_dtype="fp8", calculate_kv_scales=True)
        with pytest.raises(ConfigError, match=r"calculate_kv_scales.*'kv_scales'"):
            identify_model(config, EngineOptions(revision="r"))

    def test_scales_of_unidentified_weights_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="'revision'"):
            identify_model(vllm_config(cache_dtype="fp8"), EngineOptions())

    def test_a_digest_from_the_user_is_taken_and_separates(self) -> None:
        config = vllm_config(cache_dtype="fp8", calculate_kv_scales=True)
        assert digest(config, kv_scales="a") != digest(config, kv_scales="b")

    @pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "int8_per_token_head"])
    def test_scales_inside_the_block_need_no_digest(self, cache_dtype: str) -> None:
        identity = identify_model(vllm_config(cache_dtype=cache_dtype), EngineOptions())
        assert identity.kv_scales is None


class TestHashAlgorithm:
    @pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
    def test_cryptographic_hashes_are_taken(self, algorithm: str) -> None:
        config = vllm_config(prefix_caching_hash_algo=algorithm)
        check_hash_algorithm(config, EngineOptions())
        assert hash_caution(config) is None

    def test_others_are_refused_with_the_way_out(self) -> None:
        config = vllm_config(prefix_caching_hash_algo="xxhash")
        with pytest.raises(ConfigError, match="'allow_weak_hashes'"):
            check_hash_algorithm(config, EngineOptions())
        check_hash_algorithm(config, EngineOptions(allow_weak_hashes=True))

    def test_a_random_seed_is_said_loudly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = vllm_config(prefix_caching_hash_algo="xxhash_cbor")
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        assert "NOTHING" in (hash_caution(config) or "")
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        assert "NOTHING" not in (hash_caution(config) or "")


def test_a_namespace_describes_its_writer() -> None:
    config = vllm_config(rank=0, world_size=2)
    namespace = namespace_of(
        identify_model(config, EngineOptions(revision="r")), engine_layout="rows", vllm_config=config
    )
    assert (namespace.engine, namespace.world_size, namespace.host) == ("vllm", 2, os.uname().nodename)
    assert namespace_of(
        identify_model(config, EngineOptions(revision="r")), engine_layout="rows", vllm_config=SimpleNamespace()
    ).digest(SPEC) == namespace.digest(SPEC)


def test_identification_logs_nothing_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        identify_model(vllm_config(), EngineOptions())
    assert not caplog.records

"""What the backend finds out about the server it runs in, from SGLang's published arguments."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (make test-engines)", allow_module_level=True)

from kvstore.fingerprint import fingerprint_weights
from tests.engines.sglang import rig
from tests.engines.sglang.conftest import ConfigOf, OpenBackend

pytestmark = pytest.mark.engine

FIELDS = {"model_type": "llama", "num_key_value_heads": 12, "rope_theta": 1e4}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "config.json").write_text(json.dumps(FIELDS))
    return folder


def namespace(open_backend: OpenBackend, config: Any, served: Any, /, **fields: Any) -> Any:
    """The namespace of the KV pool in a process whose server has such arguments."""
    extra = {name: fields.pop(name) for name in ("model", "revision", "text_config") if name in fields}
    with rig.runtime_context.get_context().override_server_args(**served):
        backend = open_backend({"config": config} | extra, ("kv", rig.mha_pool()), **fields)
    return backend._store.pool("kv").cache.namespace


def test_weights_and_configuration_come_from_the_models_folder(
    model_folder: Path, config_of: ConfigOf, open_backend: OpenBackend
) -> None:
    config, served = config_of("lmdb"), {"model_path": str(model_folder)}
    found = namespace(open_backend, config, served, model_name="served")
    assert (found.model, found.revision) == ("served", fingerprint_weights(model_folder))
    assert found.text_config is not None
    assert found.engine_version == version("sglang")
    longer = namespace(open_backend, config, served | {"context_length": 8192}, model_name="served")
    scaled = namespace(open_backend, config, served | {"json_model_override_args": '{"a": 1}'}, model_name="served")
    assert len({found.text_config, longer.text_config, scaled.text_config}) == 3


def test_heads_of_a_shard_come_from_the_models_configuration(
    model_folder: Path, config_of: ConfigOf, open_backend: OpenBackend
) -> None:
    """Three heads a rank of twelve: the second of four shards; of nine, they cannot be what a rank has."""
    config, served = config_of("lmdb"), {"model_path": str(model_folder)}
    found = namespace(open_backend, config, served, tp_rank=1, tp_size=4)
    assert (found.kv_heads, found.engine_layout) == ((3, 6), None)
    (model_folder / "config.json").write_text(json.dumps(FIELDS | {"num_key_value_heads": 9}))
    found = namespace(open_backend, config, served, tp_rank=1, tp_size=4)
    assert (found.kv_heads, found.engine_layout) == (None, "sglang tp=1/4")


def test_what_the_user_says_comes_first(model_folder: Path, config_of: ConfigOf, open_backend: OpenBackend) -> None:
    said = {"model": "org/demo", "revision": "abc", "text_config": "t"}
    found = namespace(open_backend, config_of("lmdb"), {"model_path": str(model_folder)}, **said)
    assert (found.model, found.revision, found.text_config) == ("org/demo", "abc", "t")


def test_without_a_server_only_the_name_is_known(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    backend = open_backend({"config": config_of("lmdb")}, ("kv", rig.mha_pool()), model_name="served")
    found = backend._store.pool("kv").cache.namespace
    assert (found.model, found.revision, found.text_config) == ("served", None, None)

"""Whose KV: a model by name, and a model by folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvstore_lmcache.identity import namespace_of
from kvstore_lmcache.options import Options
from kvstore_lmcache.stores import Stores

from tests.unit.lmcache.conftest import names, noise
from tests.unit.lmcache.test_store import FORM

MEMORY = {"l2": [{"backend": "memory", "capacity": "1MiB"}]}


def folder_of(path: Path, weights: bytes = b"w" * 100, config: str = '{"rope_theta": 1}') -> str:
    path.mkdir()
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(config)
    return str(path)


def test_a_model_name_is_known_by_its_name_and_what_the_options_say() -> None:
    options = Options(revision="abc", kv_scales="s")
    namespace = namespace_of("org/model", options, "tag", "0.5.6")

    assert (namespace.model, namespace.revision, namespace.kv_scales) == ("org/model", "abc", "s")
    assert namespace.engine_layout == "tag"
    assert namespace.digest(FORM.spec) == namespace_of("org/model", options, "tag", "9").digest(FORM.spec)


def test_hashes_of_another_algorithm_are_other_chunks() -> None:
    stores = [Stores(Options(config=MEMORY, revision="r"), hashing=name) for name in ("builtin", "sha256_cbor", None)]

    digests = {one.open("m", FORM).cache.namespace.digest(FORM.spec) for one in stores}

    for one in stores:
        one.close()
    assert len(digests) == 3


def test_other_weights_in_a_folder_are_another_model(tmp_path: Path) -> None:
    one = namespace_of(folder_of(tmp_path / "a"), Options(), "tag")
    two = namespace_of(folder_of(tmp_path / "b", weights=b"x" * 100), Options(), "tag")
    three = namespace_of(folder_of(tmp_path / "c", config='{"rope_theta": 2}'), Options(), "tag")

    assert one.revision not in (None, two.revision)
    assert one.revision == three.revision
    assert one.text_config not in (None, three.text_config)


def test_a_folder_without_weights_needs_a_revision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    namespace = namespace_of(str(tmp_path), Options(), "tag")

    assert namespace.revision is None
    assert "say the revision yourself" in caplog.text
    assert namespace_of(str(tmp_path), Options(revision="r", text_config="t"), "tag").revision == "r"


def test_new_weights_find_nothing_of_the_old(tmp_path: Path) -> None:
    config = {"l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "64MiB"}]}
    found = []
    for revision in ("1", "2", "1"):
        stores = Stores(Options(config=config, revision=revision))
        store = stores.open("m", FORM)
        found.append(store.contains(names(1)))
        if not found[-1][0]:
            store.put(names(1), [noise(FORM.spec.nbytes, 1)])
        stores.close()

    assert found == [[False], [False], [True]]

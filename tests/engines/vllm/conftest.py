from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockSpec, Namespace
from tests.engines.vllm.rig import make_tiny_model
from tests.support_s3 import CREDENTIALS, make_bucket, moto_url

__all__ = ["moto_url"]


def read_namespace(store: Path) -> tuple[Namespace, BlockSpec]:
    """What a store says about the only namespace in it: all that another program needs to read it."""
    (document,) = store.glob("**/namespaces/*.json")
    text = document.read_text()
    fields = json.loads(text)["spec"]
    del fields["fingerprint"]
    return Namespace.from_json(text), BlockSpec(**fields)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def make_tier(tmp_path_factory: pytest.TempPathFactory, moto_url: str) -> Callable[..., dict[str, Any]]:
    """Makes the entry of a kvstore tier on a fresh medium."""

    def make(backend: str, **options: Any) -> dict[str, Any]:
        if backend == "s3":
            bucket = tmp_path_factory.mktemp("bucket").name.replace("_", "-")
            make_bucket(moto_url, bucket)
            options = {"bucket": bucket, "endpoint_url": moto_url, **CREDENTIALS, **options}
        else:
            options = {"path": str(tmp_path_factory.mktemp(backend)), "capacity": "64MiB", **options}
        return {"type": "kvstore", "config": {"l2": [{"backend": backend, **options}]}}

    return make


def store_folder(tier: Mapping[str, Any]) -> Path:
    """Where a tier made by ``make_tier`` keeps its blocks."""
    return Path(tier["config"]["l2"][0]["path"])

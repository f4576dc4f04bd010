from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support_s3 import CREDENTIALS, make_bucket, moto_url

__all__ = ["config_of", "medium", "moto_url", "open_backend"]

ConfigOf = Callable[..., dict[str, Any]]
OpenBackend = Callable[..., Any]


@pytest.fixture(params=["lmdb", "nvme", "s3"])
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config_of(tmp_path: Path, request: pytest.FixtureRequest) -> ConfigOf:
    """A store's config on a medium of this test."""

    def make(medium: str, **options: Any) -> dict[str, Any]:
        tier: dict[str, Any] = {"backend": medium, "path": str(tmp_path / medium), "capacity": "64MiB"}
        if medium == "s3":
            url, bucket = request.getfixturevalue("moto_url"), f"b-{uuid.uuid4().hex}"
            make_bucket(url, bucket)
            tier = {"backend": "s3", "bucket": bucket, "endpoint_url": url, "region": "us-east-1", **CREDENTIALS}
        return {"defaults": {"deadline": "20s"}, "l2": [tier | options]}

    return make


@pytest.fixture
def open_backend() -> Iterator[OpenBackend]:
    """Backends made by SGLang's factory from an extra config, closed at the end of the test."""
    from tests.engines.sglang import rig

    opened: list[Any] = []

    def make(extra_config: dict[str, Any], *pools: tuple[str, Any], **fields: Any) -> Any:
        config = rig.storage_config(extra_config, **fields)
        backend = rig.StorageBackendFactory.create_backend("dynamic", config, None)
        opened.append(backend)
        for name, pool in pools:
            if name == "kv":
                backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, rig.hicache_storage.PoolName(name))
        backend.on_host_pools_registered()
        return backend

    yield make
    for backend in opened:
        backend.close()

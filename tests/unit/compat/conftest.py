from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import Namespace
from kvstore.compat import aibrix
from tests.unit.compat.rig import MakeCache, config_of

NAMESPACE = Namespace(model="m", revision="r")


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees what another one, or a developer's shell, has configured."""
    for name in [name for name in os.environ if name.startswith("AIBRIX_")]:
        monkeypatch.delenv(name)
    aibrix.configure()
    yield
    aibrix.configure()
    aibrix.uninstall()


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    """Opens caches of small blocks and closes them."""
    opened = []

    def make(
        config: Any = None,
        *,
        l1: str | None = "1MiB",
        namespace: Namespace = NAMESPACE,
        meaning: Any = "chained",
        **spec: Any,
    ) -> aibrix.BaseKVCacheManager:
        config = {"l1": {"capacity": l1} if l1 else {"enabled": False}} | (config or {})
        aibrix.configure(config, namespace=namespace, block_hashes=meaning)
        opened.append(aibrix.BaseKVCacheManager(config_of(**spec)))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(make_cache: MakeCache) -> aibrix.BaseKVCacheManager:
    return make_cache()

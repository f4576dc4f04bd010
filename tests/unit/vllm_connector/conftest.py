"""Stores that are closed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import KVCache
from tests.unit.vllm_connector.doubles import OpenStore, open_store


@pytest.fixture
def make_store() -> Iterator[OpenStore]:
    opened: list[KVCache] = []

    def make(revision: str = "r", **config: Any) -> KVCache:
        opened.append(open_store(revision, **config))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store: OpenStore) -> KVCache:
    return make_store()

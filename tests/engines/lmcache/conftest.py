from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

# Read when LMCache is imported.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

if importlib.util.find_spec("lmcache") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of LMCache's own imports, which the tests' modules would repeat
        import lmcache.v1.distributed.l2_adapters.plugin_l2_adapter
        import lmcache.v1.storage_backend.storage_manager  # noqa: F401


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts in-process engines; all are stopped at the end, and none may have lost memory."""
    from tests.engines.lmcache.engine import Engine

    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(Engine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()

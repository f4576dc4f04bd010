"""AIBrix KVCache beside kvstore.compat.aibrix, in one process and without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.compat import aibrix
from tests.engines.aibrix.pair import MakePair, Pair, Side, sides_of

PREFIX = "AIBRIX_KV_CACHE_OL_"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What AIBrix needs on a host without CUDA, and its files in a folder of the test."""
    for name in [name for name in os.environ if name.startswith("AIBRIX_")]:
        monkeypatch.delenv(name)
    settings = {
        "DEVICE": "cpu:0",  # any name but "cpu", whose memory is pinned, which needs CUDA
        "L1_CACHE_CAPACITY_GB": "0.0625",
        "ROCKSDB_ROOT": str(tmp_path / "rocksdb"),
        "SHFS_ROOT": str(tmp_path / "shfs"),
        "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "2000",
        "L2_CACHE_INGESTION_TYPE": "ALL",
    }
    for name, value in settings.items():
        monkeypatch.setenv(PREFIX + name, value)


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """Opens both libraries' caches with the same variables and closes them."""
    opened: list[Side] = []

    def make(**spec: object) -> Pair:
        sides = sides_of(**spec)
        opened.extend(sides)
        return Pair(*sides)

    yield make
    for side in opened:
        side.close()
    aibrix.configure()

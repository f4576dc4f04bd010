"""Stores that the commands move records between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.command import EXIT_OK
from kvstore.cli.main import main
from tests.stateful.media import Place
from tests.unit.cli.tiers import MakeConfig, fill, write_config


@pytest.fixture
def make(tmp_path: Path) -> MakeConfig:
    """Configs of one tier each, by medium and name."""

    def config(medium: str, name: str = "a", url: str = "", **core: Any) -> Path:
        tier = Place(tmp_path, url).tier(medium, name, capacity=core.pop("capacity", "64MiB"), **core)
        return write_config(tmp_path / f"{medium}-{name}.toml", tier)

    return config


@pytest.fixture
def source(make: MakeConfig) -> Path:
    """An LMDB store with two sequences."""
    config = make("lmdb", "source")
    fill(config)
    return config


@pytest.fixture
def archive(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "kv.tar"
    assert main(["export", str(source), "--to", str(path)]) == EXIT_OK
    return path

"""Stores that the commands look into and move records between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.command import EXIT_OK
from kvstore.cli.main import main
from tests.faults.s3_faults import S3FaultServer
from tests.stateful.media import BUCKET, SHARED, Place
from tests.unit.cli.tiers import MakeConfig, fill, write_config


@pytest.fixture(scope="module")
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer(BUCKET) as server:
        yield server


@pytest.fixture(params=SHARED)
def config(request: pytest.FixtureRequest, tmp_path: Path, server: S3FaultServer) -> Path:
    """A config file of one tier; nothing is in its store."""
    tier = Place(tmp_path, server.url).tier(request.param, tmp_path.name, capacity="64MiB")
    path = tmp_path / "k.toml"
    path.write_text("\n".join(["[l1]", "enabled = false", "[[l2]]", *(f'{k} = "{v}"' for k, v in tier.items())]))
    return path


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

"""Fixtures for the LMDB backend: real environments in tmp_path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.lmdb.stores import MIB, BackendContext, LmdbBackend, LmdbOptions, Opener


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Open backends that are closed after the test."""
    opened: list[LmdbBackend] = []

    def open_(path: Path | None = None, *, options: dict[str, Any] | None = None, **context: Any) -> LmdbBackend:
        backend = LmdbBackend()
        chosen = LmdbOptions(path=str(path or tmp_path / "store"), **(options or {}))
        backend.open(BackendContext(tier="l2", options=chosen, **{"capacity_bytes": 64 * MIB, **context}))
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def backend(opener: Opener) -> LmdbBackend:
    return opener()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings logged so far."""
    caplog.set_level(logging.WARNING, logger="kvstore.backend")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

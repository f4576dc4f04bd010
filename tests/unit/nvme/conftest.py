"""Fixtures for the NVMe backend: real stores in tmp_path."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.nvme.stores import MIB, BackendContext, NvmeBackend, NvmeOptions, Opener


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Open backends that are closed after the test."""
    opened: list[NvmeBackend] = []

    def open_(path: Path | None = None, *, options: dict[str, Any] | None = None, **context: Any) -> NvmeBackend:
        backend = NvmeBackend()
        chosen = NvmeOptions(path=str(path or tmp_path / "store"), **(options or {}))
        backend.open(BackendContext(tier="l2", options=chosen, **{"capacity_bytes": 64 * MIB, **context}))
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings logged so far."""
    caplog.set_level(logging.WARNING, logger="kvstore.backend")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own, without direct I/O on older kernels."""
    point = tmp_path / "disk"
    point.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"cannot mount a tmpfs: {e}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)

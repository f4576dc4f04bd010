"""Fixtures for the object engine: backends on a medium in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.backend import BackendContext
from tests.unit.objects.mem import MemBackend, MemMedium

Opener = Callable[..., MemBackend]


@pytest.fixture
def opener() -> Iterator[Opener]:
    """Open backends that are closed after the test; keywords of the context beside ``settings``."""
    opened: list[MemBackend] = []

    def open_(
        medium: MemMedium | None = None, settings: dict[str, object] | None = None, **context: object
    ) -> MemBackend:
        backend = MemBackend(medium, **(settings or {}))
        fields = {"tier": "mem", "options": None, "block_bytes": 300, **context}
        backend.open(BackendContext(**fields))  # type: ignore[arg-type]
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()
    for body in (body for backend in opened for body in backend.medium.bodies):
        assert body.closed, "a body was left open"


@pytest.fixture
def medium() -> MemMedium:
    return MemMedium()

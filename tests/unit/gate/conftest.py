"""Caches with a gate, closed at the end of each test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.backend import Backend
from tests.unit.gate.distant import Gated, Open, open_gated


@pytest.fixture
def open_cache() -> Iterator[Open]:
    with contextlib.ExitStack() as opened:

        def open_one(*backends: Backend, gate: Any = None, l1: Any = None, **settings: Any) -> Gated:
            gated = open_gated(*backends, gate=gate or {}, l1=l1, **settings)
            opened.enter_context(gated.cache)
            return gated

        yield open_one

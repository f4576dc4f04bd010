"""Fixtures of other folders: processes that import everything once, and a demo in which everything held."""

from __future__ import annotations

from tests.faults.conftest import forge, library
from tests.unit.demo.conftest import outcome

__all__ = ["forge", "library", "outcome"]

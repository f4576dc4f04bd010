"""The suite on every broken backend; run by test_suite_catches.py, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import BackendConformance
from tests.conformance.broken import CATCHES, needs_a_disk, plugin_name


class Broken(BackendConformance):
    hooks = "tests.conformance.broken"
    capacity_bytes = 64 << 20
    small_capacity_bytes = 2 << 20
    record_bytes = 16 << 10
    hammer_s = 0.05
    examples = 2
    epoch_age_s = 0.1
    reclaim_s = 0.3


class BrokenOnDisk(Broken):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "store")}


for broken in CATCHES:
    root = BrokenOnDisk if needs_a_disk(broken) else Broken
    globals()[f"Test{broken.__name__}"] = type(f"Test{broken.__name__}", (root,), {"plugin": plugin_name(broken)})

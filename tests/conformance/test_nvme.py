from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import BackendConformance


class TestNvme(BackendConformance):
    plugin = "nvme"

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "store")}

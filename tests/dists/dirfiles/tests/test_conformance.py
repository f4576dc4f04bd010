from pathlib import Path

import pytest

from kvstore.testing import BackendConformance


class TestDirFiles(BackendConformance):
    plugin = "dirfiles"

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, str]:
        return {"path": str(tmp_path / "store")}

"""Two ranks with different content."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import ConfigError
from kvstore.compat import aibrix
from tests.unit.compat import group_child
from tests.unit.compat.rig import config_of

ROOT = Path(__file__).resolve().parents[3]


def test_ranks_get_what_all_of_them_have(tmp_path: Path) -> None:
    command = [sys.executable, "-m", group_child.__name__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet"), str(tmp_path / "store")],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


def test_a_group_needs_ranks() -> None:
    with pytest.raises(ConfigError):
        aibrix.GroupAwareKVCacheManager(config_of(), None)  # type: ignore[arg-type]

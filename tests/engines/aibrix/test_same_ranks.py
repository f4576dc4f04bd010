"""Two ranks with different content: each library's group gives the same answers on the same rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aibrix_kvcache", reason="aibrix-kvcache is not installed: make test-engines")
pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]


def answers(library: str, folder: Path) -> list[Any]:
    """What rank 0 and rank 1 were told, in processes of their own."""
    command = [sys.executable, "-m", "tests.engines.aibrix.rank_child", library]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / library)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    lines = [out.rpartition("ANSWERS ")[2] for out, _ in outputs]
    return [json.loads(line) for line in lines]


def test_ranks_are_told_the_same(tmp_path: Path) -> None:
    theirs, ours = answers("theirs", tmp_path), answers("ours", tmp_path)
    assert ours == theirs
    acquired = ours[0][1]
    assert acquired[0] == "OK"
    assert acquired[1][0] == 12  # what both ranks have

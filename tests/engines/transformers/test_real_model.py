"""The demo with the real model: two processes, one document, the short form."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.demo.model import convert, find_source, is_converted, model_folder

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf; make test installs it"),
]


@pytest.fixture(scope="module")
def converted() -> None:
    """Converts into the user's cache folder, as the demo does: once for all runs of the tests."""
    source = find_source()
    if not is_converted(source, model_folder()):
        convert(source, model_folder())


@pytest.mark.usefixtures("converted")
def test_short_demo_is_green(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "kvstore", "demo", "--short", "--json",
        "--store", str(tmp_path / "store"), "--report", str(tmp_path / "report"),
    ]  # fmt: skip

    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "120"})

    assert done.returncode == 0, done.stderr + done.stdout
    facts = json.loads(done.stdout)
    assert {check["name"]: check["passed"] for check in facts["checks"]} == {
        "new process": True,
        "restored": True,
        "bit-identical": True,
        "tokens identical": True,
    }
    first, second = facts["restored"]["answers"]
    assert first["restored_tokens"] >= 250
    assert second["restored_tokens"] >= 240
    assert "Marta Lindqvist" in first["text"]
    assert "Biscuit" in second["text"]
    assert facts["restored_s"] < facts["cold_s"]
    assert (tmp_path / "report" / "report.html").stat().st_size > 3000

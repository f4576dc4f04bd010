from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DIRFILES = Path(__file__).parent / "dirfiles"
collect_ignore = ["dirfiles"]  # its own tests are run where it is installed: tests/conformance/test_dirfiles.py


@pytest.fixture(scope="session")
def dirfiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution ``kvstore-dirfiles``, built and installed as a user would, into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*command, *options, str(DIRFILES)], check=True, capture_output=True, text=True, timeout=120)
    return target

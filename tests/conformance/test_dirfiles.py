"""A newcomer's backend, installed as a user would, passes its own test file: the whole suite."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.dists.conftest import DIRFILES, dirfiles

__all__ = ["dirfiles"]


def test_the_second_distribution_passes_the_whole_suite(dirfiles: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(DIRFILES), str(DIRFILES / "tests")],
        env=os.environ | {"PYTHONPATH": str(dirfiles)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    suite = next(ET.parse(report).iter("testsuite"))  # noqa: S314 - as above
    assert int(suite.attrib["tests"]) > 100
    assert suite.attrib["skipped"] == "0"

"""A bounded run of the coverage-guided fuzzer over each target."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

RUN = Path(__file__).parent / "run_atheris.py"
SECONDS = 1
"""For each target, after its seeds and corpus; time and not a count, so that a busy machine takes no longer."""

missing = importlib.util.find_spec("atheris") is None
pytestmark = pytest.mark.skipif(missing, reason="needs atheris, which has no wheel for this Python or system")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.timeout(300)
def test_a_guided_run_over_all_targets_breaks_no_law(tmp_path: Path) -> None:
    done = run("all", "--seconds", str(SECONDS), "--artefacts", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stderr.splitlines() if line.endswith(": all laws held")] == [
        f"{name}: all laws held" for name in TARGETS
    ]
    assert len(re.findall(r"^Done [1-9]\d* runs", done.stderr, re.MULTILINE)) == len(TARGETS)
    assert "no interesting inputs" not in done.stderr, "nothing was instrumented"
    assert not list(tmp_path.iterdir())


def test_what_breaks_a_law_is_kept_and_repeated(tmp_path: Path) -> None:
    """The machinery can fail: an input that makes a target raise becomes an artefact that replays."""
    culprit = tmp_path / "culprit"
    culprit.write_bytes(b"ok")
    assert run("names", "--replay", str(culprit)).returncode == 0
    done = run("self-test", "--runs", "20000", "--artefacts", str(tmp_path / "found"))
    assert done.returncode != 0
    (artefact,) = (tmp_path / "found").iterdir()
    assert artefact.read_bytes()[:1] == b"!"
    again = run("self-test", "--replay", str(artefact))
    assert again.returncode == 1
    assert "a law that some bytes break" in again.stderr

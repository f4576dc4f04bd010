"""The frame around all commands: help, usage, errors, pipes, interrupts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import command, main
from kvstore.cli.command import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_UNAVAILABLE, EXIT_USAGE, exit_code_of
from kvstore.errors import BackendUnavailableError, ConfigError, CorruptRecordError, KVStoreError, PluginNotFoundError

COMMANDS = (
    "demo",
    "init",
    "config",
    "config check",
    "doctor",
    "plugins",
    "plugins list",
    "plugins check",
    "ls",
    "stat",
    "verify",
    "gc",
)


def kvstore(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(command_line, capture_output=True, text=True, check=False, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def run_of(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make ``kvstore plugins list`` raise."""

    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("kvstore.cli.plugins._list", fail)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_a_description_and_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main([*name.split(), "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert len(text.partition("\n\n")[2].partition("\n\n")[0]) > 80, "no paragraph that teaches"
    examples = [
        line
        for line in text.partition("examples:")[2].splitlines()
        if line.startswith("  kvstore") or " kvstore " in line
    ]
    assert examples, "no example"
    assert all(f"kvstore {name.split(maxsplit=1)[0]}" in line for line in examples)


def test_python_m_kvstore_is_the_command() -> None:
    done = kvstore("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvstore 0.")


def test_no_command_prints_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == EXIT_USAGE
    assert "commands:" in capsys.readouterr().err
    assert main.main(["plugins"]) == EXIT_USAGE
    assert "usage: kvstore plugins" in capsys.readouterr().err


def test_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["lst"])
    assert stopped.value.code == EXIT_USAGE
    assert "'lst'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), EXIT_USAGE),
        (PluginNotFoundError("x"), EXIT_USAGE),
        (BackendUnavailableError("x"), EXIT_UNAVAILABLE),
        (CorruptRecordError("checksum", "x"), EXIT_FINDINGS),
        (KVStoreError("x"), EXIT_FINDINGS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_have_exit_codes(error: KVStoreError, code: int) -> None:
    assert exit_code_of(error) == code
    assert code in command.EXIT_CODES


def test_error_is_one_message_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(monkeypatch, BackendUnavailableError("no medium"))
    assert main.main(["plugins", "list"]) == EXIT_UNAVAILABLE
    assert capsys.readouterr() == ("", "kvstore: no medium\n")


def test_error_is_json_too_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(monkeypatch, ConfigError("bad"))
    assert main.main(["plugins", "list", "--json"]) == EXIT_USAGE
    expected = {"error": {"type": "ConfigError", "message": "bad", "exit_code": EXIT_USAGE}}
    assert json.loads(capsys.readouterr().out) == expected


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(monkeypatch, ConfigError("bad"))
    with pytest.raises(ConfigError, match="bad"):
        main.main(["plugins", "list", "--debug"])


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(monkeypatch, KeyboardInterrupt())
    assert main.main(["plugins", "list"]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "kvstore: interrupted\n"


def test_closed_pipe_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = tmp_path / "stderr"
    with os.fdopen(writer, "w") as output, errors.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", "plugins", "list"], stdout=output, stderr=stderr, check=False, timeout=60
        )
    assert (done.returncode, errors.read_text()) == (0, "")


def test_bug_in_a_command_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main.main(["plugins", "list"])

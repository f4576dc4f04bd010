"""``kvstore doctor`` says whether the keys that a config names are there, and shows none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import main

KEY = bytes(range(100, 132))


def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, findings about the host, and the text."""
    config = tmp_path / "kvstore.toml"
    config.write_text(f'{text}\n[[l2]]\nbackend = "memory"\ncapacity = "4MiB"\n')
    code = main(["doctor", str(config), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert main(["doctor", str(config)]) == code
    return code, report["host"], capsys.readouterr().out


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


SECTIONS = {
    "defaults.record_keys": "[defaults]\nrecord_keys = ['{source}']",
    "codecs.aes-gcm.keys": "[codecs.aes-gcm]\nkeys = ['{source}']",
}


@pytest.mark.parametrize("option", SECTIONS)
def test_a_key_that_is_there_is_said_to_be(
    option: str, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, host, text = examine(tmp_path, capsys, SECTIONS[option].format(source=f"file:{key_file}"))
    assert code == 0
    assert [finding["level"] for finding in host if "keys" in finding["what"]] == ["ok"]
    assert KEY.hex()[:8] not in text


@pytest.mark.parametrize("option", SECTIONS)
def test_a_key_that_is_not_there_is_a_problem(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, host, text = examine(tmp_path, capsys, SECTIONS[option].format(source=f"file:{tmp_path}/none"))
    assert code == 1
    (problem,) = [finding for finding in host if finding["level"] == "problem"]
    assert option in problem["what"]
    assert f"{tmp_path}/none" in problem["what"]
    assert option in text


def test_nothing_is_said_of_keys_where_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, host, _ = examine(tmp_path, capsys, "")
    assert code == 0
    assert [finding for finding in host if "key" in finding["what"] or "codec" in finding["what"]] == []

"""``kvstore init``, ``kvstore config check`` and ``kvstore plugins``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE
from kvstore.cli.main import main


def test_init_writes_a_config_that_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvstore.toml"
    assert main(["init", str(file), "--path", str(tmp_path / "store")]) == EXIT_OK
    assert f"kvstore config check {file}" in capsys.readouterr().out
    assert tomllib.loads(file.read_text())["l2"] == [{"backend": "lmdb", "path": str(tmp_path / "store")}]
    assert main(["config", "check", str(file)]) == EXIT_OK
    assert "all settings are valid" in capsys.readouterr().out
    assert not (tmp_path / "store").exists(), "checking a config must create nothing"


def test_init_leaves_an_existing_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("# mine")
    assert main(["init", str(file)]) == EXIT_USAGE
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == "# mine"
    assert main(["init", str(file), "--force"]) == EXIT_OK
    assert "[[l2]]" in file.read_text()


def test_init_names_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "no" / "kvstore.toml")]) == EXIT_USAGE
    assert "cannot be written" in capsys.readouterr().err


def test_init_prints_for_another_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "-", "--backend", "memory"]) == EXIT_OK
    assert tomllib.loads(capsys.readouterr().out)["l2"] == [{"backend": "memory"}]


def test_init_json_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.toml"
    assert main(["init", str(file), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out) == {
        "file": str(file),
        "backend": "lmdb",
        "path": "~/.cache/llm-kvstore/store",
    }


def test_check_shows_values_with_their_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[l1]\ncapacity = "1GiB"\n[[l2]]\nbackend = "lmdb"\npath = "/x"\n')
    assert main(["config", "check", str(file), "--json"]) == EXIT_OK
    settings = {s["path"]: (s["value"], s["origin"]) for s in json.loads(capsys.readouterr().out)["settings"]}
    assert settings["l1.capacity"] == (1 << 30, "file")
    assert settings["l1.policy"] == ("prefix-lru", "default")
    assert settings["l2[0].max_readers"][1] == "plugin default"
    assert main(["config", "check", str(file)]) == EXIT_OK
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("l1.capacity"))
    assert line.split() == ["l1.capacity", "=", '"1GiB"', "#", "file"]


def test_check_reads_the_file_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[[l2]]\nbackend = "memory"\n')
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    assert main(["config", "check"]) == EXIT_OK
    assert str(file) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[l1]\ncapcity = "1GiB"', "capacity"),
        ('[l1]\ncapacity = "1 parsec"', "l1.capacity"),
        ('[[l2]]\nbackend = "lmbd"', "lmbd"),
        ("[l1\n", "TOML"),
    ],
    ids=["unknown key", "wrong unit", "unknown backend", "syntax"],
)
def test_check_of_a_bad_config_says_what_is_wrong(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.toml"
    file.write_text(text)
    assert main(["config", "check", str(file)]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(file) in captured.err
    assert named in captured.err


def test_plugins_list_imports_nothing_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == EXIT_OK
    states = {info["name"]: info["status"] for info in json.loads(capsys.readouterr().out)}
    assert states["lmdb"] == "installed"
    assert main(["plugins", "list", "--load", "--json"]) == EXIT_OK
    infos = {info["name"]: info for info in json.loads(capsys.readouterr().out)}
    assert infos["lmdb"]["status"] == "active"
    assert infos["lmdb"]["kinds"] == ["backend"]


def test_plugins_list_is_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == EXIT_OK
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "STATE", "PROVIDES", "FROM", "DETAIL"]
    assert {row.split()[0] for row in rows} >= {"lmdb", "memory", "none", "planes", "prefix-lru"}


@pytest.mark.parametrize("name", ["lmdb", "memory", "planes", "prefix-lru"])
def test_plugins_that_come_with_kvstore_pass_the_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", name]) == EXIT_OK
    assert all(line.startswith("ok ") for line in capsys.readouterr().out.splitlines())


def test_plugins_check_of_an_unknown_name_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "lmbd", "--json"]) == EXIT_FINDINGS
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["ok"] is False
    assert "lmbd" in finding["detail"]


@pytest.mark.parametrize(("backend", "placeholders"), [("lmdb", ""), ("nvme", ""), ("s3", "bucket")])
def test_init_writes_a_config_for_every_backend_and_names_what_to_fill_in(
    backend: str, placeholders: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k.toml"
    assert main(["init", str(path), "--backend", backend]) == EXIT_OK
    said = capsys.readouterr().out
    assert ("first: replace what it says for bucket" in said) == bool(placeholders)
    assert main(["config", "check", str(path)]) == EXIT_OK

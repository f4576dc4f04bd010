"""``kvstore ls``, ``stat`` and ``verify`` on real stores."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import BackendContext
from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE, store_exit_code
from kvstore.cli.main import main
from kvstore.plugins import Registry
from kvstore.types import Call
from tests.unit.cli.stores import NAMESPACE, SPEC, damage, fill, key, opened, put, read


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def names(store: Path) -> list[bytes]:
    return fill(store)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = EXIT_OK) -> Any:
    assert main([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    return [json.loads(line) for line in out.splitlines()] if arguments[0] == "ls" else json.loads(out)


def test_ls_describes_every_record(store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    rows = sorted(run_json(capsys, "ls", str(store)), key=lambda row: row["block_index"])
    assert [row["name"] for row in rows] == [name.hex() for name in names]
    assert [row["digest"] for row in rows] == [digest.hex() for digest in key().digests]
    assert [row["codec"] for row in rows] == ["none", "planes", "planes"]
    assert {row["namespace"] for row in rows} == {NAMESPACE.digest(SPEC).hex()}
    assert {(row["kind"], row["tokens"], row["raw_bytes"]) for row in rows} == {("tokens", 16, SPEC.nbytes)}
    assert rows[0]["stored_bytes"] > SPEC.nbytes > rows[1]["stored_bytes"]


def test_ls_is_a_table_for_people(store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(store), "--limit", "2"]) == EXIT_OK
    count, heading, *rows = capsys.readouterr().out.splitlines()
    assert count == "tier 'lmdb': 2 records"
    assert heading.split() == ["NAMESPACE", "BLOCK", "KIND", "INDEX", "TOKENS", "CODEC", "RAW", "STORED", "AGE"]
    assert len(rows) == 2
    assert {row.split()[1] for row in rows} <= {name[17:25].hex() for name in names}


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_ls_refuses_a_limit_that_is_no_count(limit: str, store: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["ls", str(store), "--limit", limit])
    assert stopped.value.code == EXIT_USAGE


@pytest.mark.usefixtures("names")
def test_stat_sums_up_by_namespace(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run_json(capsys, "stat", str(store))
    assert report["usage"]["records"] == 3
    (entry,) = report["namespaces"]
    assert entry["namespace"] == NAMESPACE.digest(SPEC).hex()
    assert (entry["records"], entry["tokens"], entry["raw_bytes"]) == (3, 48, 3 * SPEC.nbytes)
    assert entry["codecs"] == {"none": 1, "planes": 2}
    assert entry["cleared"] == 0
    assert entry["description"]["identity"]["model"] == "smollm2-135m"
    assert entry["description"]["spec"]["dtype"] == "bfloat16"


@pytest.mark.usefixtures("names")
def test_stat_tells_people_model_layout_and_ratio(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", str(store)]) == EXIT_OK
    text = capsys.readouterr().out
    for part in (
        "model smollm2-135m",
        "bfloat16 LCND",
        "3 records, 48 tokens",
        "ratio 1.",
        "codecs: none 1, planes 2",
        str(store),
    ):
        assert part in text


def test_stat_counts_what_no_prompt_reaches(
    store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = run_json(capsys, "stat", str(store))[0]["namespaces"]
    assert (entry["orphans"], entry["orphaned_bytes"]) == (0, 0)
    assert 0 < entry["first_use"] <= entry["last_use"] <= time.time()
    with opened(store) as backend:
        backend.delete_many([names[1]], Call.within(5))
    (entry,) = run_json(capsys, "stat", str(store))[0]["namespaces"]
    assert (entry["records"], entry["orphans"], entry["orphaned_bytes"]) == (2, 1, len(read(store, names[2])))
    assert main(["stat", str(store)]) == EXIT_OK
    assert "orphaned: 1 record" in capsys.readouterr().out


@pytest.mark.usefixtures("names")
def test_stat_counts_cleared_records_apart(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(store) as backend:
        backend.epoch(NAMESPACE.digest(SPEC), bump=True)
    (report,) = run_json(capsys, "stat", str(store))
    assert report["namespaces"][0]["cleared"] == 3


@pytest.mark.usefixtures("names")
def test_verify_of_a_sound_store_finds_nothing(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run_json(capsys, "verify", str(store))
    assert (report["records"], report["sound"], report["corrupt"], report["unread"]) == (3, 3, [], 0)
    assert main(["verify", str(store)]) == EXIT_OK
    assert "3 records checked, all sound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at", "reason"), [(0, "magic"), (40, "checksum"), (-1, "checksum")], ids=["magic", "head", "payload"]
)
def test_verify_finds_one_changed_byte(
    at: int, reason: str, store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, names[1], at)
    (report,) = run_json(capsys, "verify", str(store), code=EXIT_FINDINGS)
    assert [(record["name"], record["reason"]) for record in report["corrupt"]] == [(names[1].hex(), reason)]
    assert report["sound"] == 2
    assert read(store, names[1]), "verify must change nothing"


def test_verify_finds_a_record_under_the_name_of_another(
    store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    other = read(store, names[0])
    with opened(store) as backend:
        backend.delete_many([names[1]], Call.within(5))
        put(backend, names[1], [other])
    (report,) = run_json(capsys, "verify", str(store), code=EXIT_FINDINGS)
    assert [record["reason"] for record in report["corrupt"]] == ["key"]


def test_verify_drops_what_is_corrupt_only_when_told(
    store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, names[2], -1)
    assert main(["verify", str(store)]) == EXIT_FINDINGS
    assert "--drop-corrupt" in capsys.readouterr().out
    (report,) = run_json(capsys, "verify", str(store), "--drop-corrupt", code=EXIT_FINDINGS)
    assert report["dropped"] == 1
    (report,) = run_json(capsys, "verify", str(store))
    assert report["sound"] == 2
    assert read(store, names[2]) == b""
    assert read(store, names[0]) != b""


@pytest.mark.usefixtures("names")
def test_dropping_from_a_directory_keeps_the_capacity_of_the_store(store: Path) -> None:
    with opened(store, capacity_bytes=96 << 20) as backend:
        assert backend.usage().capacity_bytes == 96 << 20
    assert main(["verify", str(store), "--drop-corrupt"]) == EXIT_OK
    assert main(["stat", str(store)]) == EXIT_OK
    registry = Registry.discover()
    backend = registry.create_backend("lmdb")
    backend.open(BackendContext("lmdb", registry.backend("lmdb").options(path=str(store)), read_only=True))
    try:
        assert backend.usage().capacity_bytes == 96 << 20
    finally:
        backend.close()


def test_damaged_heads_show_in_ls_and_stat(store: Path, names: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    damage(store, names[0], 0)
    assert main(["ls", str(store)]) == EXIT_FINDINGS
    assert "corrupt (magic)" in capsys.readouterr().out
    (report,) = run_json(capsys, "stat", str(store), code=EXIT_FINDINGS)
    assert (report["corrupt"], report["namespaces"][0]["records"]) == (1, 2)


@pytest.mark.usefixtures("names")
def test_config_and_tier_choose_the_store(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "k.toml"
    config.write_text(f'[[l2]]\nbackend = "memory"\n[[l2]]\nbackend = "lmdb"\nname = "disk"\npath = "{store}"\n')
    assert main(["verify", str(config)]) == EXIT_OK
    captured = capsys.readouterr()
    assert "tier 'disk': 3 records checked" in captured.out
    assert "'memory' keeps nothing at rest" in captured.err
    assert main(["verify", "--config", str(config), "--tier", "disk"]) == EXIT_OK
    assert capsys.readouterr().err == ""


def test_wrong_choices_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "k.toml"
    config.write_text('[[l2]]\nbackend = "memory"\n')
    assert main(["ls", str(config), "--tier", "disk"]) == EXIT_USAGE
    assert "its tiers: memory" in capsys.readouterr().err
    assert main(["ls", str(config)]) == EXIT_USAGE
    assert "no tier keeps data at rest" in capsys.readouterr().err
    assert main(["ls", str(config), "--config", str(config)]) == EXIT_USAGE
    assert "name one of them" in capsys.readouterr().err
    assert main(["ls"]) == EXIT_USAGE
    assert "KVSTORE_CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ls", "stat", "verify"])
def test_a_store_that_is_not_there_is_not_made(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert main([name, str(folder)]) == EXIT_UNAVAILABLE
    assert str(folder) in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("name", ["ls", "stat", "verify"])
def test_looking_changes_no_file(name: str, store: Path) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and "lock" not in path.name}
    assert main([name, str(store)]) == EXIT_OK
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("names")
def test_stores_can_be_looked_into_while_they_are_used(store: Path) -> None:
    with opened(store):
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", "verify", str(store)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 records checked, all sound" in done.stdout


@pytest.mark.parametrize(
    ("corrupt", "unread", "code"), [(False, False, 0), (True, False, 1), (False, True, 3), (True, True, 1)]
)
def test_damage_that_was_found_counts_before_what_could_not_be_read(*, corrupt: bool, unread: bool, code: int) -> None:
    assert store_exit_code(corrupt=corrupt, unread=unread) == code


def test_a_limit_that_is_no_number_is_refused_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    for limit in ("many", "0", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main(["ls", "somewhere", f"--limit={limit}"])
        assert f"{limit!r} is not a whole number of at least 1" in capsys.readouterr().err


def test_a_directory_of_an_unnamed_backend_is_told_how_to_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stat", str(tmp_path)]) == EXIT_UNAVAILABLE
    assert "--backend names another" in capsys.readouterr().err
    assert main(["stat", str(tmp_path), "--backend", "lmdb"]) == EXIT_UNAVAILABLE
    assert "--backend" not in capsys.readouterr().err

"""What ``kvstore doctor`` hears about the place of a store."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest
from kvstore_lmdb.diagnose import diagnose

from kvstore.backend import Finding
from tests.unit.lmdb.stores import MIB, BackendContext, LmdbOptions, Opener, item_of, name_of, put, read, run


def findings(path: Path | str, capacity_bytes: int | None = 64 * MIB, **options: object) -> list[Finding]:
    return diagnose(BackendContext("l2", LmdbOptions(str(path), **options), capacity_bytes))  # type: ignore[arg-type]


def worst(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level != "ok"]


def test_a_place_that_is_not_there_is_fine_and_stays_so(tmp_path: Path) -> None:
    found = findings(tmp_path / "a" / "b")
    assert worst(found) == []
    assert any("will be created with mode 0700" in finding.what for finding in found)
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_use_is_looked_at_and_left_alone(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    found = findings(tmp_path / "store")
    assert worst(found) == []
    assert "reader slots were used" in found[-1].what
    assert read(backend, [name_of(1)]) != [None]


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_is_none_is_a_problem(path: str) -> None:
    (finding,) = findings(path)
    assert finding.level == "problem"
    assert "'path'" in finding.what


def test_a_file_in_the_place_of_the_directory_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a directory" in worst(findings(tmp_path / "file"))[0].what


def test_a_directory_that_others_may_write_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (finding,) = worst(findings(tmp_path / "open"))
    assert finding.level == "warning"
    assert "mode 0777" in finding.what
    assert finding.advice.startswith("chmod 0700")


def test_a_capacity_beyond_the_disk_is_a_warning_that_names_one_that_fits(tmp_path: Path) -> None:
    (finding,) = worst(findings(tmp_path / "store", 1 << 50))
    assert finding.level == "warning"
    assert "lower the capacity to " in finding.advice


def test_damage_is_a_problem_and_stays_as_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    (store / "data.mdb").write_bytes(b"\x5a" * 50_000)
    (finding,) = worst(findings(store))
    assert finding.level == "problem"
    assert "is damaged" in finding.what
    assert (store / "data.mdb").read_bytes() == b"\x5a" * 50_000


@pytest.mark.parametrize(
    ("kind", "allowed", "level"), [("nfs4", False, "problem"), ("nfs4", True, "warning"), ("overlay", False, "warning")]
)
def test_file_systems_that_do_not_suit_are_named(
    kind: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, allowed: bool
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/x / {kind} rw 0 0\n")
    monkeypatch.setattr("kvstore_lmdb.diagnose._MOUNTS", mounts)
    (finding,) = worst(findings(tmp_path / "store", allow_network_fs=allowed))
    assert finding.level == level
    assert f"of type {kind}" in finding.what


def test_a_limited_address_space_is_a_problem(tmp_path: Path) -> None:
    code = """
    import resource
    from kvstore_lmdb.diagnose import diagnose
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, resource.RLIM_INFINITY))
    (found,) = [f for f in diagnose(BackendContext("l2", LmdbOptions(sys.argv[2]), 64 * MIB)) if f.level != "ok"]
    assert found.level == "problem" and "ulimit -v" in found.advice, found
    assert not [f for f in diagnose(BackendContext("l2", LmdbOptions(sys.argv[2], map_size=1 << 30), MIB)) if f.level != "ok"]
    """
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    result = run(code, tmp_path / "unused", str(tmp_path / "store"))
    assert result.returncode == 0, result.stderr


def test_a_read_only_mount_is_a_warning(tmp_path: Path) -> None:
    point = tmp_path / "disk"
    point.mkdir()
    code = """
    from kvstore_lmdb.diagnose import diagnose
    found = diagnose(BackendContext("l2", LmdbOptions(str(STORE / "store")), 64 * MIB))
    assert any("read-only mount" in f.what and f.level == "warning" for f in found), found
    """
    from tests.unit.lmdb.stores import script

    command = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro tmpfs "$1"; shift; exec "$@"', "sh", str(point)]
    result = subprocess.run([*command, *script(code, point)], capture_output=True, text=True, check=False, timeout=60)
    if "unshare" in result.stderr:
        pytest.skip(f"no mounts here: {result.stderr}")
    assert result.returncode == 0, result.stderr

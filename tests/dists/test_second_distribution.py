"""A stranger's backend: a distribution of its own, found, selected by a config file and used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUND_TRIP = Path(__file__).parent / "round_trip.py"

LIST = """
from kvstore.plugins import Registry
import sys
registry = Registry.discover()
(info,) = [info for info in registry.list() if info.name == "dirfiles"]
print(info.distribution, info.version, info.target, info.status)
assert "kvstore_dirfiles" not in sys.modules
print(registry.load("dirfiles").status)
assert "kvstore_dirfiles.backend" not in sys.modules
for finding in registry.check("dirfiles"):
    print(finding.ok, finding.subject)
"""


def run(site: Path, *arguments: str, fails: bool = False) -> str:
    """Run Python with the second distribution on its path; return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(f'[l1]\ncapacity = "1MiB"\n[[l2]]\nbackend = "dirfiles"\npath = "{tmp_path / "store"}"\n')
    return path


def test_it_is_listed_loaded_and_checked(dirfiles: Path) -> None:
    assert run(dirfiles, "-c", LIST).splitlines() == [
        "kvstore-dirfiles 1.0 kvstore_dirfiles.hooks installed",
        "active",
        "True dirfiles",
        "True backend dirfiles",
    ]


def test_a_config_file_selects_it(dirfiles: Path, config: Path) -> None:
    code = "import sys; from kvstore.config import load_config; print(load_config(sys.argv[1]).l2[0].options)"
    assert "DirFilesOptions" in run(dirfiles, "-c", code, str(config))


def test_its_options_are_checked_like_the_cores(dirfiles: Path, config: Path) -> None:
    code = "import sys; from kvstore.config import load_config; load_config(sys.argv[1])"
    config.write_text('[[l2]]\nbackend = "dirfiles"\npth = "/data"\n')
    error = run(dirfiles, "-c", code, str(config), fails=True)
    assert f"{config}: l2[0].pth = '/data': unknown key 'pth'; did you mean 'path'?" in error
    config.write_text('[[l2]]\nbackend = "dirfiles"\npath = ""\n')
    error = run(dirfiles, "-c", code, str(config), fails=True)
    assert f"{config}: l2[0] (backend 'dirfiles'): path is empty: expected a directory" in error


def test_without_it_the_config_names_what_is_missing(config: Path, tmp_path: Path) -> None:
    code = "import sys; from kvstore.config import load_config; load_config(sys.argv[1])"
    error = run(tmp_path, "-c", code, str(config), fails=True)
    assert f"PluginNotFoundError: {config}: l2[0].backend = 'dirfiles': unknown backend 'dirfiles'" in error


def test_blocks_come_back_from_it_in_a_new_process(dirfiles: Path, config: Path, tmp_path: Path) -> None:
    assert run(dirfiles, str(ROUND_TRIP), "put", str(config)).split() == ["accepted", "5"]
    stored = list((tmp_path / "store").rglob("*.rec"))
    assert len(stored) == 5
    got = run(dirfiles, str(ROUND_TRIP), "get", str(config))
    assert got.split() == ["delivered", "5", "identical", "True"]

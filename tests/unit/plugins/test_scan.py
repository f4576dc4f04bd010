from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from kvstore.errors import PluginConflictError
from kvstore.plugins import Registry
from kvstore.plugins.loader import installed
from tests.unit.plugins.fakes import write_dist


def status(registry: Registry, name: str) -> str:
    return next(info.status for info in registry.list() if info.name == name)


def test_listing_imports_no_plugin(site: Path) -> None:
    write_dist(site, modules={"kvg": "raise SystemExit(3)"})
    info = next(info for info in Registry.discover().list() if info.name == "good")
    assert (info.distribution, info.version, info.target) == ("kv-good", "1.2", "kvg")
    assert (info.status, info.kinds) == ("installed", ())
    assert "kvg" not in sys.modules


def test_only_the_asked_plugin_is_imported(site: Path) -> None:
    write_dist(site)
    write_dist(site, "kv-sleepy", entry_points={"sleepy": "kvs"}, modules={"kvs": "import time; time.sleep(30)"})
    registry = Registry.discover()
    assert registry.backend("good").name == "good"
    assert status(registry, "good") == "active"
    assert status(registry, "sleepy") == "installed"


def test_installed_metadata_is_scanned_once_per_path(site: Path) -> None:
    write_dist(site)
    first = installed()
    assert "good" in first
    assert installed() is first


def test_the_plugins_of_kvstore_come_through_the_same_door() -> None:
    own = {info.name for info in Registry.discover().list() if info.distribution == "llm-kvstore"}
    assert {"lmdb", "memory", "none", "zstd", "planes", "prefix-lru"} <= own


def test_two_distributions_with_one_name_are_a_conflict_that_names_both(site: Path) -> None:
    write_dist(site)
    write_dist(site, "kv-shadow", "0.3", entry_points={"good": "kvs"}, modules={"kvs": ""})
    registry = Registry.discover()
    with pytest.raises(PluginConflictError) as caught:
        registry.backend("good")
    for part in ("'good'", "kv-good 1.2", "kvg", "kv-shadow 0.3", "kvs", "uninstall"):
        assert part in str(caught.value)
    info = next(info for info in registry.list() if info.name == "good")
    assert info.status == "conflict"
    assert set(info.distribution.split(", ")) == {"kv-good", "kv-shadow"}
    assert set(info.version.split(", ")) == {"1.2", "0.3"}


def test_a_conflict_between_others_hurts_nobody(site: Path) -> None:
    write_dist(site)
    write_dist(site, "kv-a", entry_points={"clash": "a"}, modules={})
    write_dist(site, "kv-b", entry_points={"clash": "b"}, modules={})
    assert Registry.discover().backend("good").name == "good"


def test_an_identical_twin_is_one_plugin(site: Path) -> None:
    write_dist(site)
    write_dist(site, kind="egg-info", modules={})
    write_dist(site, "kv-renamed", modules={})  # same name, same target: the same module
    registry = Registry.discover()
    assert registry.backend("good").name == "good"
    assert [info.name for info in registry.list()].count("good") == 1


def test_an_older_version_later_on_the_path_is_no_conflict(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dist(site)
    old = tmp_path / "old"
    write_dist(old, version="0.9", entry_points={"good": "kvold", "dropped": "kvold"}, modules={})
    monkeypatch.setattr(sys, "path", [*sys.path, str(old)])
    registry = Registry.discover()
    assert registry.backend("good").name == "good"
    assert "dropped" not in registry.names()


def test_damaged_metadata_hides_no_other_plugin(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_dist(site)
    damaged = site / "kv_damaged-1.0.dist-info"
    damaged.mkdir()
    (damaged / "entry_points.txt").write_text("[kvstore]\nthis line has no equals sign\n")
    unreadable = site / "kv_unreadable-1.0.dist-info"
    unreadable.mkdir()
    (unreadable / "entry_points.txt").write_bytes(b"[kvstore]\n\xff = x\n")
    with caplog.at_level(logging.WARNING):
        registry = Registry.discover()
    assert registry.backend("good").name == "good"
    assert len([record for record in caplog.records if "cannot read the entry points" in record.message]) == 2


def test_a_distribution_without_a_name_still_counts(site: Path) -> None:
    write_dist(site)
    (site / "kv_good-1.2.dist-info" / "METADATA").unlink()
    registry = Registry.discover()
    assert registry.backend("good").name == "good"
    assert next(info for info in registry.list() if info.name == "good").distribution == "unknown distribution"

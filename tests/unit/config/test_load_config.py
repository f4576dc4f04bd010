from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import Config, L1Config, TierConfig, load_config
from kvstore.errors import ConfigError
from kvstore.plugins import Registry
from tests.unit.config.conftest import DiskOptions, Mode

FULL = """
plugins = ["memory"]
blocked_plugins = ["s3", ""]

[l1]
capacity = "64MiB"
policy = "lru"

[defaults]
deadline = "2s"

[[l2]]
backend = "disk"
name = "fast"
path = "/data"
capacity = "10GB"
codec = "none"
admit = "all"
deadline = "500ms"
required = false
queue = "1MiB"
workers = 3
durability = "durable"
buffer = "2MiB"
patience = "1min"
depth = 8
ratio = 1
sync = true
layout = "tree"
mode = "direct"
mirrors = ["a", "b"]
limit = 7
secret_key = "hunter2"

[[l2]]
backend = "memory"
"""


def test_file_with_every_key_gives_exactly_its_values(write: Callable[[str], Path], registry: Registry) -> None:
    config = load_config(write(FULL), registry)
    options = DiskOptions(
        path="/data",
        buffer=2 << 20,
        patience=60.0,
        depth=8,
        ratio=1.0,
        sync=True,
        layout="tree",
        mode=Mode.DIRECT,
        mirrors=("a", "b"),
        limit=7,
        secret_key="hunter2",  # noqa: S106 - nobody's
    )
    tier = TierConfig(
        backend="disk",
        name="fast",
        capacity=10 * 10**9,
        codec="none",
        admit="all",
        deadline=0.5,
        required=False,
        queue=1 << 20,
        workers=3,
        durability="durable",
        options=options,
    )
    assert config.l2[0] == tier
    assert config.l1 == L1Config(enabled=True, capacity=64 << 20, device="cpu", policy="lru")
    assert config.defaults.deadline == 2.0
    assert config.plugins == ("memory",)
    assert config.blocked_plugins == ("s3", "")


def test_missing_keys_take_the_plugins_defaults_then_the_cores(registry: Registry) -> None:
    values = {"defaults": {"deadline": 3}, "l2": [{"backend": "disk", "path": "/data"}, {"backend": "memory"}]}
    disk, memory = load_config(values, registry).l2
    assert (disk.admit, disk.deadline, disk.capacity) == ("hot", 0.25, 1 << 30)
    assert (memory.admit, memory.deadline, memory.capacity) == ("all", 3.0, None)
    assert disk.options == DiskOptions(path="/data")


def test_file_mapping_and_object_give_equal_configs(write: Callable[[str], Path], registry: Registry) -> None:
    from_file = load_config(write(FULL), registry)
    from_mapping = load_config(from_file.to_dict(), registry)
    from_object = load_config(
        Config(
            l1=from_file.l1,
            defaults=from_file.defaults,
            l2=from_file.l2,
            plugins=from_file.plugins,
            blocked_plugins=from_file.blocked_plugins,
        ),
        registry,
    )
    assert from_file == from_mapping == from_object


def test_toml_round_trip_is_exact(write: Callable[[str], Path], registry: Registry) -> None:
    config = load_config(write(FULL), registry)
    awkward = replace(config.l2[0].options, path='a "quoted" \\ path\twith \x7f and ü', mirrors=("", "'"))
    config = replace(config, l2=(replace(config.l2[0], options=awkward), config.l2[1]))
    assert load_config(write(config.to_toml()), registry) == config


def test_loading_a_loaded_config_changes_nothing(registry: Registry) -> None:
    config = load_config({"l2": [{"backend": "disk", "path": "/data"}]}, registry)
    assert load_config(config, registry) is config


def test_path_objects_are_text(registry: Registry, tmp_path: Path) -> None:
    config = load_config({"l2": [{"backend": "disk", "path": tmp_path}]}, registry)
    assert config.l2[0].options.path == str(tmp_path)


def test_object_is_checked_like_a_file(registry: Registry) -> None:
    for config in (
        Config(l1=L1Config(capacity=-1)),
        Config(l2=(TierConfig(backend="memory", admit="hto"),)),  # type: ignore[arg-type]
        Config(l2=(TierConfig(backend="memory", workers=0),)),
        Config(l2=(TierConfig(backend="disk", options={"path": 3}),)),
    ):
        with pytest.raises(ConfigError, match="expected"):
            load_config(config, registry)


def test_tiers_of_one_backend_get_names_of_their_own() -> None:
    tiers: list[dict[str, Any]] = [
        {"backend": "memory"},
        {"backend": "memory", "name": "memory-2"},
        {"backend": "memory"},
    ]
    assert [tier.name for tier in Config.from_mapping({"l2": tiers}).l2] == ["memory", "memory-2", "memory-3"]


def test_environment_variable_names_the_file(
    write: Callable[[str], Path], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write('[l1]\ncapacity = "1MiB"\n[[l2]]\nbackend = "memory"')
    monkeypatch.setenv("KVSTORE_CONFIG", str(path))
    assert load_config(None, registry).l1.capacity == 1 << 20
    path.write_text("[l1]\ncapacity = -1")
    with pytest.raises(ConfigError, match=r"kvstore\.toml \(from KVSTORE_CONFIG\): l1\.capacity = -1"):
        load_config(None, registry)


@pytest.mark.parametrize("value", [None, ""])
def test_no_config_at_all_says_how_to_give_one(
    value: str | None, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)
    if value is not None:
        monkeypatch.setenv("KVSTORE_CONFIG", value)
    with pytest.raises(ConfigError, match=r"KVSTORE_CONFIG.*kvstore init"):
        load_config(None, registry)


def test_file_without_tiers_warns_that_nothing_is_kept(
    write: Callable[[str], Path], registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(write("[l1]\nenabled = true"), registry)
    assert "no [[l2]] tier" in caplog.text


def test_checking_creates_nothing(write: Callable[[str], Path], registry: Registry, tmp_path: Path) -> None:
    store = tmp_path / "store"
    load_config(write(f'[[l2]]\nbackend = "disk"\npath = "{store}"'), registry)
    assert [path.name for path in tmp_path.iterdir()] == ["kvstore.toml"]


def test_blocked_plugins_are_blocked_in_the_registry(registry: Registry) -> None:
    load_config({"blocked_plugins": ["fifo"]}, registry)
    assert next(info for info in registry.list() if info.name == "fifo").status == "blocked"

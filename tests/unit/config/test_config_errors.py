"""What the errors say: source, key path, value, what was expected, the nearest name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import Config, load_config
from kvstore.config.place import without_secrets
from kvstore.errors import (
    ConfigError,
    KVStoreError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    UnknownKeyError,
)
from kvstore.plugins import Registry
from kvstore.plugins.loader import Candidate
from tests.unit.config.conftest import DiskOptions

TIER = '[[l2]]\nbackend = "disk"\npath = "/data"\n'

UNKNOWN = {
    "top": ("[l1x]\na = 1", ["l1x", "did you mean 'l1'?", "plugins"]),
    "l1": ('[l1]\ncapcity = "1GiB"', ["l1.capcity = '1GiB'", "did you mean 'capacity'?", "policy"]),
    "defaults": ("[defaults]\ndeadlin = 5", ["defaults.deadlin = 5", "did you mean 'deadline'?"]),
    "tier": (TIER + TIER + 'capcity = "5GiB"', ["l2[1].capcity = '5GiB'", "did you mean 'capacity'?", "durability"]),
    "option": (TIER + "bufer = 3", ["l2[0].bufer = 3", "did you mean 'buffer'?", "expected one of: "]),
    "misplaced": (TIER + 'blocked_plugins = ["x"]', ["l2[0].blocked_plugins", "belongs to the top level"]),
    "misplaced-l1": ("[l1]\nplugins = []", ["l1.plugins = []", "belongs to the top level"]),
}

WRONG = {
    "size-unit": ('[l1]\ncapacity = "10 GiBs"', ["l1.capacity = '10 GiBs'", "unknown unit 'GiBs'", '"4GiB"']),
    "size-negative": ("[l1]\ncapacity = -1", ["l1.capacity = -1", "not above 0", "expected a size"]),
    "size-zero": ("[l1]\ncapacity = 0", ["l1.capacity = 0", "not above 0"]),
    "size-nan": ("[l1]\ncapacity = nan", ["l1.capacity = nan", "expected a size"]),
    "size-bool": ("[l1]\ncapacity = true", ["l1.capacity = true", "expected a size"]),
    "bool-text": ('[l1]\nenabled = "yes"', ["l1.enabled = 'yes'", "expected true or false"]),
    "bool-number": ("[l1]\nenabled = 1", ["l1.enabled = 1", "expected true or false"]),
    "device": ('[l1]\ndevice = "gpu"', ["l1.device = 'gpu'", '"cpu" or "cuda:N"']),
    "duration-unit": ('[defaults]\ndeadline = "5m"', ["defaults.deadline = '5m'", "unknown unit 'm'", '"2min"']),
    "duration-zero": ("[defaults]\ndeadline = 0", ["defaults.deadline = 0", "above 0"]),
    "duration-long": ('[defaults]\ndeadline = "2h"', ["defaults.deadline = '2h'", 'at most "1h"']),
    "choice": (
        TIER + 'admit = "hots"',
        ["l2[0].admit = 'hots'", "did you mean 'hot'?", "one of 'all', 'hot'"],
    ),
    "durability": (TIER + 'durability = "safe"', ["l2[0].durability = 'safe'", "'durable'"]),
    "workers": (TIER + "workers = 0", ["l2[0].workers = 0", "from 1 to 1024"]),
    "workers-text": (TIER + 'workers = "4"', ["l2[0].workers = '4'", "expected an integer"]),
    "tier-name": (TIER + 'name = "l1"', ["l2[0].name = 'l1'", 'other than "l1"']),
    "duplicate": (f'{TIER}name = "a"\n{TIER}name = "a"', ["l2[1].name = 'a'", "l2[0] has it"]),
    "no-backend": ("[[l2]]\nworkers = 1", ["l2[0].backend is missing", "plugin"]),
    "l2-table": ('[l2]\nbackend = "disk"', ["l2 = ", "write [[l2]]"]),
    "l2-item": ("l2 = [3]", ["l2[0] = 3", "a table"]),
    "l1-value": ("l1 = 3", ["l1 = 3", "[l1]"]),
    "plugins": ('plugins = "prometheus"', ["plugins = 'prometheus'", "an array of texts"]),
    "nothing-enabled": ("[l1]\nenabled = false", ["l1.enabled = false", "at least one [[l2]] tier"]),
    "option-missing": ('[[l2]]\nbackend = "disk"', ["l2[0].path is missing", "text", "Directory."]),
    "option-int": (TIER + "depth = 1.5", ["l2[0].depth = 1.5", "expected an integer"]),
    "option-float": (TIER + "ratio = inf", ["l2[0].ratio = inf", "expected a finite number"]),
    "option-choice": (TIER + 'layout = "tre"', ["l2[0].layout = 'tre'", "did you mean 'tree'?"]),
    "option-enum": (TIER + 'mode = "none"', ["l2[0].mode = 'none'", "one of 'direct', 'buffered'"]),
    "option-strings": (TIER + "mirrors = [1]", ["l2[0].mirrors = [1]", "an array of texts"]),
    "option-optional": (TIER + 'limit = "x"', ["l2[0].limit = 'x'", "expected an integer"]),
    "option-range": (TIER + "depth = 0", ["l2[0] (backend 'disk')", "depth is 0: expected at least 1"]),
    "date": (TIER + "depth = 1979-05-27", ["l2[0].depth = datetime.date(1979, 5, 27)", "an integer"]),
    "syntax": ("[l1]\ncapacity = 4GiB", ["not valid TOML", "line 2"]),
    "octal": (TIER + "depth = 010", ["not valid TOML", "line 4"]),
    "twice": ("[l1]\n[l1]", ["not valid TOML", "line 2"]),
    "empty": ("", ["the file has no settings"]),
    "comments": ("# nothing\n", ["the file has no settings"]),
}


def message(write: Callable[[str], Path], registry: Registry, text: str, expected: type[KVStoreError]) -> str:
    with pytest.raises(KVStoreError) as caught:
        load_config(write(text), registry)
    assert type(caught.value) is expected
    assert str(caught.value).startswith(str(write(text)))  # the file
    return str(caught.value)


@pytest.mark.parametrize(("text", "parts"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_key_names_its_path_and_the_nearest_key(
    write: Callable[[str], Path], registry: Registry, text: str, parts: list[str]
) -> None:
    error = message(write, registry, text, UnknownKeyError)
    for part in parts:
        assert part in error


@pytest.mark.parametrize(("text", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_value_names_its_path_and_what_was_expected(
    write: Callable[[str], Path], registry: Registry, text: str, parts: list[str]
) -> None:
    error = message(write, registry, text, ConfigError)
    for part in parts:
        assert part in error


def test_missing_plugin_names_the_setting_and_the_nearest_plugin(
    write: Callable[[str], Path], registry: Registry
) -> None:
    for text, parts in (
        ('[[l2]]\nbackend = "dsk"', ["l2[0].backend = 'dsk'", "unknown backend", "did you mean 'disk'?", "memory"]),
        ('[l1]\npolicy = "prefix-lur"', ["l1.policy = 'prefix-lur'", "unknown policy", "did you mean 'prefix-lru'?"]),
        (TIER + 'codec = "nonne"', ["l2[0].codec = 'nonne'", "unknown codec", "did you mean 'none'?"]),
        ('plugins = ["prometheus"]', ["plugins[0] = 'prometheus'", "unknown plugin", "install"]),
        ('[[l2]]\nbackend = "lru"', ["l2[0].backend = 'lru'", "is a policy, not a backend"]),
    ):
        error = message(write, registry, text, PluginNotFoundError)
        for part in parts:
            assert part in error


def test_selected_broken_plugin_names_setting_distribution_and_cause(write: Callable[[str], Path]) -> None:
    registry = Registry({"bad": (Candidate("bad", "boto99.hooks", "kv-bad", "0.1"),)})
    with pytest.raises(PluginLoadError) as caught:
        load_config(write('[l1]\nenabled = false\n[[l2]]\nbackend = "bad"'), registry)
    for part in (
        "kvstore.toml",
        "l2[0].backend = 'bad'",
        "kv-bad 0.1",
        "ModuleNotFoundError: No module named 'boto99'",
    ):
        assert part in str(caught.value)


def test_selected_conflict_names_setting_and_both_distributions(write: Callable[[str], Path]) -> None:
    registry = Registry({"bad": (Candidate("bad", "a", "kv-a", "0.1"), Candidate("bad", "b", "kv-b", "0.2"))})
    with pytest.raises(PluginConflictError) as caught:
        load_config(write('[l1]\nenabled = false\n[[l2]]\nbackend = "bad"'), registry)
    for part in ("l2[0].backend = 'bad'", "kv-a 0.1 (a)", "kv-b 0.2 (b)"):
        assert part in str(caught.value)


def test_plugin_that_is_selected_and_blocked_names_the_setting(
    write: Callable[[str], Path], registry: Registry
) -> None:
    error = message(write, registry, f'blocked_plugins = ["disk"]\n{TIER}', PluginError)
    assert "l2[0].backend = 'disk'" in error
    assert "is blocked" in error


def test_missing_file_is_named(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file; 'kvstore init' writes one"):
        load_config(tmp_path / "nowhere.toml", registry)


def test_file_that_cannot_be_read_is_named(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path, registry)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=r"binary\.toml: byte 5 is not UTF-8"):
        load_config(binary, registry)


def test_mapping_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="mapping = 3: expected a mapping"):
        Config.from_mapping(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected text as a key"):
        Config.from_mapping({"l1": {3: 4}})


@pytest.mark.parametrize(
    "changes",
    [
        {"secret_key": ["hunter2"]},
        {"secret_ky": "hunter2"},
        {"secret_key": "hunter2", "depth": 0},
        {"secret_key": "hunter2", "depht": 3},
        {"passphrase": "hunter2"},
        {"secret_key": "hunter2", "depth": "x"},
    ],
    ids="-".join,
)
def test_secrets_are_in_no_message_and_no_traceback(changes: dict[str, Any], registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"l2": [{"backend": "disk", "path": "/data"} | changes]}, registry)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_credential_like_unknown_key_is_hidden_also_where_nothing_is_secret(registry: Registry) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        load_config({"l2": [{"backend": "memory", "aws_secret_access_key": "hunter2"}]}, registry)
    assert "l2[0].aws_secret_access_key = ***" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "secret", "shown"),
    [
        ("the key hunter2hunter2x is wrong", "hunter2hunter2", "the key ***x is wrong"),
        ("access key a is a bad one: 'a'", "a", "access key *** is *** bad one: '***'"),
        ("credentials are bad", "a", "credentials are bad"),
        ("nothing in it", "minio", "nothing in it"),
    ],
)
def test_a_secret_is_hidden_and_the_text_around_it_is_not(text: str, secret: str, shown: str) -> None:
    assert without_secrets(text, [secret]) == shown


def test_secrets_are_in_no_repr(registry: Registry) -> None:
    config = load_config({"l2": [{"backend": "disk", "path": "/data", "secret_key": "hunter2"}]}, registry)
    assert config.l2[0].options == DiskOptions(path="/data", secret_key="hunter2")  # noqa: S106 - nobody's
    assert "hunter2" not in repr(config)


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"l1": {"capacity": "9" * 10_000}})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("l1", [{"enabled": False}, {"enabled": True}])
def test_a_tier_for_evicted_blocks_needs_l1(l1: dict[str, bool]) -> None:
    config = {"l1": l1, "l2": [{"backend": "memory", "admit": "evicted"}]}
    if l1["enabled"]:
        assert load_config(config).l2[0].admit == "evicted"
        return
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert str(caught.value) == (
        'mapping: l2[0].admit = \'evicted\': expected "all" or "hot": l1.enabled is false, so nothing leaves L1'
    )

"""Behind an engine the store is its tiers, unless the config asks for L1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config.place import Place
from kvstore.engines.store_config import check_config_option, load_store_config
from kvstore.errors import ConfigError, KVStoreError

TIER = {"l2": [{"backend": "memory", "capacity": "1MiB"}]}


def test_l1_is_off_unless_the_config_speaks_of_it() -> None:
    assert not load_store_config(TIER).l1.enabled
    assert load_store_config(TIER | {"l1": {"capacity": "8MiB"}}).l1.enabled
    assert load_store_config(TIER | {"l1": {"policy": "lru"}}).l1.enabled


def test_a_tier_takes_what_the_engine_offers_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    tiers = [{"backend": "nvme", "path": str(tmp_path / name), "capacity": "16MiB"} for name in "ab"]
    loaded = load_store_config({"l2": [tiers[0], tiers[1] | {"admit": "hot"}]})
    assert [tier.admit for tier in loaded.l2] == ["all", "hot"]


def test_a_tier_that_waits_for_what_l1_evicts_needs_an_l1() -> None:
    tier = {"backend": "memory", "capacity": "1MiB", "admit": "evicted"}
    with pytest.raises(ConfigError, match="nothing leaves L1"):
        load_store_config({"l2": [tier]})
    assert load_store_config({"l1": {"capacity": "8MiB"}, "l2": [tier]}).l2[0].admit == "evicted"


def test_a_required_salt_has_to_be_given_to_the_connector() -> None:
    config = TIER | {"defaults": {"require_salt": True}}
    with pytest.raises(ConfigError, match=r"require_salt is true.*no 'salt'"):
        load_store_config(config)
    assert load_store_config(config, salt="team-a").defaults.require_salt


def test_a_file_and_the_environment_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[[l2]]\nbackend = "memory"\ncapacity = "1MiB"\n')
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    assert load_store_config(None).l2 == load_store_config(file).l2 == load_store_config(str(file)).l2
    assert not load_store_config(None).l1.enabled


def test_no_config_at_all_names_both_ways_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r"set 'config' to .*KVSTORE_CONFIG"):
        load_store_config(None)


@pytest.mark.parametrize("config", [{}, {"l1": {"enabled": False}}])
def test_a_store_that_would_keep_nothing_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no tier|no \[\[l2\]\] tier"):
        load_store_config(config)


def test_l1_alone_is_a_store() -> None:
    assert load_store_config({"l1": {"capacity": "8MiB"}}).l1.enabled


def test_an_option_of_another_type_is_named() -> None:
    assert check_config_option(TIER, Place("tier 'kvstore'")) is TIER
    with pytest.raises(ConfigError, match=r"tier 'kvstore': config = 7: expected the path of a TOML file"):
        check_config_option(7, Place("tier 'kvstore'"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"l2": [{"backend": "lmdb"}]}, "path"),
        ({"l2": [{"backend": "lmbd", "path": "/x"}]}, "lmbd"),
        ({"l2": [{"backend": "memory", "capcity": "1MiB"}]}, "did you mean 'capacity'"),
        ("/nowhere/kvstore.toml", "no such file"),
    ],
)
def test_a_wrong_config_is_refused_with_its_place(config: Any, message: str) -> None:
    with pytest.raises(KVStoreError, match=message) as caught:
        load_store_config(config)
    assert "l2[0]" in str(caught.value) or "kvstore.toml" in str(caught.value)

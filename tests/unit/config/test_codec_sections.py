"""``[codecs.NAME]`` and the keys of records: read strictly, shown without secrets."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import Config, effective, load_config
from kvstore.errors import ConfigError, PluginLoadError
from kvstore.plugins import Registry
from tests.support_sealing import NAME, XorCodec, XorOptions, sealing_registry

TIER = {"backend": "memory"}


@pytest.fixture
def registry() -> Registry:
    return sealing_registry()


def test_a_section_is_read_into_the_options_of_the_codec(write: Callable[[str], Path], registry: Registry) -> None:
    text = f'[codecs.{NAME}]\nphrase = "hunter2"\nweight = 3\n[[l2]]\nbackend = "memory"\n'
    config = load_config(write(text), registry)
    assert config.codecs == {NAME: XorOptions("hunter2", "none", 3)}
    settings = {setting.path: (setting.text, setting.origin) for setting in effective(config)}
    assert settings[f"codecs.{NAME}.phrase"] == ("***", "file")
    assert settings[f"codecs.{NAME}.weight"] == ("3", "file")
    assert settings[f"codecs.{NAME}.inner"] == ('"none"', "plugin default")
    assert "hunter2" not in repr(effective(config)) + repr(config)


def test_a_config_with_codecs_survives_the_way_through_toml_and_back(
    write: Callable[[str], Path], registry: Registry
) -> None:
    config = load_config({"codecs": {NAME: {"phrase": 'a "quoted" one'}}, "l2": [TIER]}, registry)
    assert load_config(write(config.to_toml()), registry) == config
    assert load_config(config, registry) is config
    assert load_config(Config.from_mapping(config.to_dict()), registry) == config
    again = load_config(Config(l2=config.l2, codecs={NAME: XorOptions("x")}), registry)
    assert again.codecs == {NAME: XorOptions("x")}


def test_a_codec_that_a_tier_names_has_its_defaults_filled_in(registry: Registry) -> None:
    config = load_config({"l2": [{**TIER, "codec": NAME}]}, registry)
    assert config.codecs == {NAME: XorOptions()}
    assert {s.origin for s in effective(config) if s.path.startswith("codecs.")} == {"plugin default"}
    assert load_config({"l2": [{**TIER, "codec": "planes"}]}, registry).codecs == {}


@pytest.mark.parametrize(
    ("codecs", "expected"),
    [
        ({NAME: {"phras": "hunter2"}}, [f"codecs.{NAME}.phras = ***", "did you mean 'phrase'?", "inner"]),
        ({NAME: {"weight": "heavy"}}, [f"codecs.{NAME}.weight = 'heavy'", "expected an integer"]),
        ({NAME: {"phrase": 5}}, [f"codecs.{NAME}.phrase = ***", "expected text"]),
        ({"xor-sea": {"phrase": "hunter2"}}, ["codecs.xor-sea = ***", f"did you mean {NAME!r}?"]),
        ({"planes": {}}, ["codecs.planes = ***", "codec 'planes' has no options"]),
        ({"lmdb": {}}, ["codecs.lmdb = ***", "planes"]),
        ({NAME: "hunter2"}, [f"codecs.{NAME} = ***", f"a table: [codecs.{NAME}]"]),
        ("hunter", ["codecs = 'hunter'", "tables: [codecs.NAME]"]),
    ],
)
def test_a_wrong_section_is_an_error_that_says_where(registry: Registry, codecs: Any, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"codecs": codecs, "l2": [TIER]}, registry)
    assert [part for part in expected if part not in str(caught.value)] == []
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("given", ["6162" * 16, ["6162" * 16], ["file:"], ["2:env:X"], [5], [b"k" * 32]])
def test_a_key_where_a_source_belongs_is_not_shown(registry: Registry, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"defaults\.record_keys = \*\*\*: expected an array of") as caught:
        load_config({"defaults": {"record_keys": given}, "l2": [TIER]}, registry)
    assert "6162" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError, match=r"defaults\.record_key = \*\*\*: unknown key") as caught:
        load_config({"defaults": {"record_key": given}, "l2": [TIER]}, registry)
    sources = ["2=file:/etc/k", "env:OLD", "3=call:mine.vault:key"]
    config = load_config({"defaults": {"record_keys": sources}, "l2": [TIER]}, registry)
    assert config.defaults.record_keys == tuple(sources)
    assert '["2=file:/etc/k", "env:OLD", "3=call:mine.vault:key"]' in {setting.text for setting in effective(config)}


def test_a_codec_without_a_section_is_made_from_its_defaults(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="phrase is not set"):
        registry.create_codec(NAME)
    found = registry.check(NAME)
    assert [finding.ok for finding in found] == [True, True], "that it needs settings is not the plugin's fault"
    assert "works with settings only: codecs.xor-seal.phrase is not set" in found[1].detail


def test_options_of_a_codec_are_checked_like_those_of_a_backend() -> None:
    class NoDataclass:
        pass

    with pytest.raises(PluginLoadError, match="is not a dataclass type"):
        sealing_registry(codec=XorCodec, options=NoDataclass)

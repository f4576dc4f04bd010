"""What LMCache's configuration may say about the store."""

from __future__ import annotations

import pytest
from kvstore_lmcache.options import Options, plugin_name_of, plugin_options, read_options

from kvstore.errors import ConfigError

MEMORY = {"l2": [{"backend": "memory", "capacity": "1MiB"}]}


def test_a_plugin_reads_its_own_keys_only() -> None:
    extra = {
        "remote_storage_plugin.kvstore.config": "a.toml",
        "remote_storage_plugin.kvstore.module_path": "kvstore_lmcache.connector",
        "remote_storage_plugin.kvstore.class_name": "KVStoreConnectorAdapter",
        "remote_storage_plugin.kvstore.archive.config": "b.toml",
        "remote_storage_plugin.kvstore.archive.workers": 2,
        "remote_storage_plugin.fs.base_path": "/x",
    }

    assert plugin_options(extra, "kvstore") == Options(config="a.toml")
    assert plugin_options(extra, "kvstore.archive") == Options(config="b.toml", workers=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"confg": "x.toml"}, r"confg.*did you mean 'config'"),
        ({"workers": "four"}, r"workers = 'four'.*expected an integer"),
        ({"workers": 0}, r"workers = 0: expected at least 1"),
        ({"config": 7}, r"config = 7: expected the path of a TOML file"),
        ({"revision": ""}, r"revision = '': expected text"),
        ({"put_timeout": "5 parsecs"}, r"put_timeout = '5 parsecs'"),
        ({"put_timeout": "0s"}, r"put_timeout"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_options(given, "adapter_params")

    assert str(caught.value).startswith("adapter_params")


def test_durations_are_read_with_units() -> None:
    assert read_options({"put_timeout": "250ms"}, "x").put_timeout == 0.25


def test_the_class_name_finds_the_only_plugin_of_that_class() -> None:
    extra = {"remote_storage_plugin.mine.class_name": "KVStoreConnector", "remote_storage_plugin.fs.class_name": "Fs"}

    assert plugin_name_of(extra, "KVStoreConnector") == "mine"


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_no_or_two_plugins_of_a_class_are_an_error(names: tuple[str, ...]) -> None:
    extra = {f"remote_storage_plugin.{name}.class_name": "KVStoreConnector" for name in names}

    with pytest.raises(ConfigError, match=rf"^{len(names)} remote storage plugins have class_name"):
        plugin_name_of(extra or None, "KVStoreConnector")

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.config import effective, load_config, render_template
from kvstore.errors import ConfigError
from kvstore.plugins import Registry


def test_effective_settings_say_where_each_value_came_from(write: Callable[[str], Path], registry: Registry) -> None:
    text = '[defaults]\ndeadline = 2\n[[l2]]\nbackend = "disk"\npath = "/data"\nsecret_key = "hunter2"\nmode = "direct"'
    config = load_config(write(text), registry)
    settings = {setting.path: (setting.text, setting.origin) for setting in effective(config)}
    assert settings["l1.capacity"] == ('"4GiB"', "default")
    assert settings["defaults.deadline"] == ('"2s"', "file")
    assert settings["l2[0].backend"] == ('"disk"', "file")
    assert settings["l2[0].path"] == ('"/data"', "file")
    assert settings["l2[0].admit"] == ('"hot"', "plugin default")
    assert settings["l2[0].deadline"] == ('"250ms"', "plugin default")
    assert settings["l2[0].capacity"] == ('"1GiB"', "plugin default")
    assert settings["l2[0].buffer"] == ('"1MiB"', "plugin default")
    assert settings["l2[0].mode"] == ('"direct"', "file")
    assert settings["l2[0].limit"] == ("-", "plugin default")
    assert settings["l2[0].queue"] == ("-", "default")
    assert settings["l2[0].secret_key"] == ("***", "file")


def test_effective_settings_keep_their_origin_when_loaded_again(registry: Registry) -> None:
    config = load_config({"l2": [{"backend": "disk", "path": "/data"}]}, registry)
    assert effective(load_config(config, registry)) == effective(config)


def test_effective_values_hold_no_secret(registry: Registry) -> None:
    config = load_config({"l2": [{"backend": "disk", "path": "/data", "secret_key": "hunter2"}]}, registry)
    assert "hunter2" not in repr(effective(config))


def test_template_is_a_config(write: Callable[[str], Path], registry: Registry) -> None:
    config = load_config(write(render_template("disk", "/data", registry=registry)), registry)
    assert config == load_config({"l2": [{"backend": "disk", "path": "/data"}]}, registry)


def test_template_names_every_key_and_each_shown_line_is_valid(
    write: Callable[[str], Path], registry: Registry
) -> None:
    template = render_template("disk", registry=registry)
    shown = re.sub(r"^# (?=[a-z0-9_]+ = )", "", template, flags=re.MULTILINE)
    config = load_config(write(shown), registry)
    named = tomllib.loads(shown)
    assert named["l2"][0]["path"] == "change-me"
    assert {"plugins", "blocked_plugins", "l1", "defaults", "gate", "l2"} == named.keys()
    listed = {setting.path for setting in effective(config)}
    assert "# limit is not set; it takes an integer" in template
    assert listed - {"l2[0].limit"} == {"plugins", "blocked_plugins"} | {
        f"{section}.{key}"
        for section, keys in (*((name, named[name]) for name in ("l1", "defaults", "gate")), ("l2[0]", named["l2"][0]))
        for key in keys
    }


def test_template_writes_given_options(write: Callable[[str], Path], registry: Registry) -> None:
    template = render_template("disk", "/data", options={"depth": 9, "buffer": 1 << 20}, registry=registry)
    options = load_config(write(template), registry).l2[0].options
    assert (options.path, options.depth, options.buffer) == ("/data", 9, 1 << 20)


def test_template_refuses_an_option_that_the_backend_lacks(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="'memory' has no option 'path'; its options: none"):
        render_template("memory", "/data", registry=registry)

"""The store's own config behind an engine that keeps blocks in memory itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvstore.config import ENVIRONMENT_VARIABLE, Config, load_config
from kvstore.config.place import Place
from kvstore.errors import ConfigError
from kvstore.plugins import Registry

ConfigOption = Config | Mapping[str, Any] | str | os.PathLike[str] | None
"""What a connector's option ``config`` may be; None is the file that ``KVSTORE_CONFIG`` names."""

_EXAMPLE: Final = '{"l2": [{"backend": "lmdb", "path": "/var/lib/kvstore"}]}'


def check_config_option(config: object, place: Place) -> ConfigOption:
    """Check the type of a connector's option ``config``.

    Raises:
        ConfigError: It is neither a path nor a mapping.
    """
    if config is not None and not isinstance(config, Config | Mapping | str | os.PathLike):
        raise place.key("config").wrong(config, "the path of a TOML file, or a mapping of the same form")
    return config


def load_store_config(config: ConfigOption, registry: Registry | None = None, *, salt: object = None) -> Config:
    """Read the config of a store that stands behind an engine, and fill in what differs there.

    Such an engine has blocks in memory of its own in front of the store, so L1 is off unless the
    config says something about it.  It decides itself what is worth storing, and offers a block once,
    so a tier admits all blocks unless the config says otherwise.

    Args:
        config: The connector's option.
        registry: Plugins to choose from; by default those that are installed.
        salt: The connector's salt, if it has one.

    Raises:
        ConfigError: A setting is wrong, the file cannot be read, nothing would be stored anywhere, or
            the config asks for a salt and there is none.
        PluginError: A named plugin cannot be used.
    """
    if config is None and not os.environ.get(ENVIRONMENT_VARIABLE):
        raise ConfigError(
            f"no kvstore config is given: set 'config' to the path of a TOML file or to a mapping such as {_EXAMPLE}, "
            f"or the environment variable {ENVIRONMENT_VARIABLE} to such a file"
        )
    loaded = load_config(config, registry)
    if not any(setting.startswith("l1.") for setting in loaded.origins):
        if not loaded.l2:
            raise ConfigError(
                f"{loaded.source}: no [[l2]] tier; expected at least one, since the engine is the cache in memory"
            )
        loaded = replace(loaded, l1=replace(loaded.l1, enabled=False))
    unsaid = {i for i in range(len(loaded.l2)) if loaded.origins.get(f"l2[{i}].admit") == "plugin default"}
    tiers = tuple(replace(tier, admit="all") if i in unsaid else tier for i, tier in enumerate(loaded.l2))
    if loaded.defaults.require_salt and salt is None:
        raise ConfigError(
            f"{loaded.source}: defaults.require_salt is true, but the connector has no 'salt': the engine's own salts "
            "are inside its block hashes, where kvstore cannot see them; give 'salt', or set require_salt = false"
        )
    return load_config(replace(loaded, l2=tiers), registry)

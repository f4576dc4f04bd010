"""From a file, a mapping or a Config to a checked Config."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvstore.config.model import Config, Origin
from kvstore.config.place import Place, without_secrets
from kvstore.config.schema import read_section
from kvstore.config.sections import TierConfig, top_level_hint
from kvstore.errors import ConfigError, PluginError
from kvstore.plugins import TIER_KEYS, BackendPlugin, Registry
from kvstore.plugins.options import option_fields

ENVIRONMENT_VARIABLE: Final = "KVSTORE_CONFIG"

_log: Final = logging.getLogger(__name__)

ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str]


def load_config(source: ConfigSource | None = None, registry: Registry | None = None) -> Config:
    """Read and check a config completely; opens no tier and creates nothing.

    Loads the plugins that the config names, and no others.

    Args:
        source: Path of a TOML file, a mapping of the same form, or a Config; None for the file
            that the environment variable ``KVSTORE_CONFIG`` names.
        registry: Where plugins come from; None for those that are installed.  The config's
            ``blocked_plugins`` are blocked in it.

    Returns:
        The config with every default filled in: each tier has a name, ``admit``, ``deadline`` and
        the options instance of its backend.

    Raises:
        ConfigError: A setting is wrong, or the file cannot be read; the message names the source,
            the key path, the value and what was expected.
        PluginError: A named plugin cannot be used; the message names the setting too.
    """
    if registry is None:
        registry = Registry.discover()
    config = _read(source)
    registry.block(*config.blocked_plugins)
    _check_plugins(config, registry)
    origins: dict[str, Origin] = dict(config.origins)
    tiers = []
    for i, tier in enumerate(config.l2):
        place = Place(config.source).key("l2").item(i)
        plugin = _backend(tier, place, registry)
        origins |= _defaulted(tier, plugin, place.path)
        tiers.append(_resolve(tier, plugin, config.defaults.deadline, place))
        if tiers[-1].admit == "evicted" and not config.l1.enabled:
            raise place.key("admit").wrong("evicted", '"all" or "hot": l1.enabled is false, so nothing leaves L1')
    resolved = replace(config, l2=tuple(tiers), origins=MappingProxyType(origins))
    if isinstance(source, Config) and resolved == source:
        return source  # loaded before: keep what it knows about origins
    return resolved


def _read(source: ConfigSource | None) -> Config:
    if isinstance(source, Config):
        return Config.from_mapping(source.to_dict(), source=source.source)
    if isinstance(source, Mapping):
        return Config.from_mapping(source)
    label = ""
    if source is None:
        source = os.environ.get(ENVIRONMENT_VARIABLE, "")
        label = f" (from {ENVIRONMENT_VARIABLE})"
        if not source:
            msg = f"no config: give one, or set {ENVIRONMENT_VARIABLE} to the path of a file; 'kvstore init' writes one"
            raise ConfigError(msg)
    path = Path(source).expanduser()
    values = _read_toml(path, f"{path}{label}")
    config = Config.from_mapping(values, source=f"{path}{label}")
    if not config.l2:
        _log.warning("%s: no [[l2]] tier: cached blocks live in memory only and end with the process", config.source)
    return config


def _read_toml(path: Path, name: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        msg = f"{name}: no such file; 'kvstore init' writes one"
        raise ConfigError(msg) from e
    except OSError as e:
        msg = f"{name}: cannot be read: {e.strerror}; expected a TOML file"
        raise ConfigError(msg) from e
    except UnicodeDecodeError as e:
        msg = f"{name}: byte {e.start} is not UTF-8; expected a TOML file"
        raise ConfigError(msg) from e
    except tomllib.TOMLDecodeError as e:
        msg = f"{name}: not valid TOML: {e}"
        raise ConfigError(msg) from e
    if not values:
        msg = f"{name}: the file has no settings; expected at least one [[l2]] tier or an [l1] section"
        raise ConfigError(msg)
    return values


def _check_plugins(config: Config, registry: Registry) -> None:
    """Load what the config names besides backends, so that a wrong name fails here."""
    root = Place(config.source)
    for i, name in enumerate(config.plugins):
        try:
            registry.load(name)
        except PluginError as e:
            raise root.key("plugins").item(i).plugin(name, e) from e
    if config.l1.enabled:
        try:
            registry.policy(config.l1.policy)
        except PluginError as e:
            raise root.key("l1").key("policy").plugin(config.l1.policy, e) from e


def _backend(tier: TierConfig, place: Place, registry: Registry) -> BackendPlugin:
    try:
        plugin = registry.backend(tier.backend)
    except PluginError as e:
        raise place.key("backend").plugin(tier.backend, e) from e
    try:
        registry.codec(plugin.default_codec if tier.codec == "auto" else tier.codec)
    except PluginError as e:
        raise place.key("codec").plugin(tier.codec, e) from e
    return plugin


def _defaulted(tier: TierConfig, plugin: BackendPlugin, path: str) -> dict[str, Origin]:
    """Say which of a tier's values come from its plugin."""
    named = {f"{path}.{name}" for name in tier.options}
    origins: dict[str, Origin] = {
        key: "plugin default"
        for option in option_fields(plugin.options)
        if (key := f"{path}.{option.name}") not in named
    }
    if tier.admit is None:
        origins[f"{path}.admit"] = "plugin default"
    if tier.deadline is None and plugin.default_deadline_s is not None:
        origins[f"{path}.deadline"] = "plugin default"
    if tier.capacity is None and plugin.default_capacity_bytes is not None:
        origins[f"{path}.capacity"] = "plugin default"
    return origins


def _resolve(tier: TierConfig, plugin: BackendPlugin, deadline_s: float, place: Place) -> TierConfig:
    default_s = deadline_s if plugin.default_deadline_s is None else plugin.default_deadline_s
    return replace(
        tier,
        capacity=plugin.default_capacity_bytes if tier.capacity is None else tier.capacity,
        admit=tier.admit or plugin.default_admit,
        deadline=default_s if tier.deadline is None else tier.deadline,
        options=_read_options(plugin, tier.options, place),
    )


def _read_options(plugin: BackendPlugin, values: Mapping[str, object], place: Place) -> Any:
    fields = option_fields(plugin.options)
    read = read_section(fields, values, place, siblings=TIER_KEYS, hint=top_level_hint)
    problem = ""
    try:
        return plugin.options(**read)
    except (ValueError, TypeError) as e:  # what the dataclass's __post_init__ finds
        problem = str(e)
    secrets = [str(read[option.name]) for option in fields if option.secret and read.get(option.name)]
    # Outside the except block: the original exception could show a secret in a traceback.
    msg = f"{place.source}: {place.path} (backend {plugin.name!r}): {without_secrets(problem, secrets)}"
    raise ConfigError(msg)

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
from kvstore.errors import ConfigError, PluginError, PluginNotFoundError
from kvstore.plugins import TIER_KEYS, BackendPlugin, CodecPlugin, Registry
from kvstore.plugins.options import option_fields

ENVIRONMENT_VARIABLE: Final = "KVSTORE_CONFIG"

_MAX_FILE_BYTES: Final = 256 << 10
"""A config has a few KiB; /dev/zero never ends."""

_MAX_DOTS: Final = 256
"""In one line: the parser takes quadratic time over a key of many parts."""

_MAX_DEPTH: Final = 16
"""Tables in tables; the schema has three levels, and functions that follow them call themselves."""

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
        the options instance of its backend, each codec with options that is named has their instance.

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
    codecs = _resolve_codecs(config, registry, origins)
    resolved = replace(config, l2=tuple(tiers), codecs=MappingProxyType(codecs), origins=MappingProxyType(origins))
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
        values = tomllib.loads(_read_text(path))
    except FileNotFoundError as e:
        msg = f"{name}: no such file; 'kvstore init' writes one"
        raise ConfigError(msg) from e
    except OSError as e:
        msg = f"{name}: cannot be read: {e.strerror}; expected a TOML file"
        raise ConfigError(msg) from e
    except UnicodeDecodeError as e:
        msg = f"{name}: byte {e.start} is not UTF-8; expected a TOML file"
        raise ConfigError(msg) from e
    except (ValueError, RecursionError) as e:  # no TOML; a number of too many digits; nested too deep; a path with NUL
        msg = f"{name}: not valid TOML: {e}"
        raise ConfigError(msg) from e
    if _deeper(values, _MAX_DEPTH):
        msg = f"{name}: tables are nested more than {_MAX_DEPTH} deep; expected [l1], [defaults] and [[l2]]"
        raise ConfigError(msg)
    if not values:
        msg = f"{name}: the file has no settings; expected at least one [[l2]] tier or an [l1] section"
        raise ConfigError(msg)
    return values


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        msg = f"the file has more than {_MAX_FILE_BYTES} bytes"
        raise ValueError(msg)
    lines = data.split(b"\n")
    dotted = next((i for i, line in enumerate(lines, start=1) if line.count(b".") > _MAX_DOTS), None)
    if dotted is not None:
        msg = f"line {dotted} has more than {_MAX_DOTS} dots"
        raise ValueError(msg)
    return data.decode("utf-8").replace("\r\n", "\n")


def _deeper(values: object, levels: int) -> bool:
    """Whether tables and arrays are nested more than ``levels`` deep."""
    if not isinstance(values, dict | list):
        return False
    inner = values.values() if isinstance(values, dict) else values
    return levels == 0 or any(_deeper(value, levels - 1) for value in inner)


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
    origins = _defaulted_options(plugin.options, tier.options, path)
    if tier.admit is None:
        origins[f"{path}.admit"] = "plugin default"
    if tier.deadline is None and plugin.default_deadline_s is not None:
        origins[f"{path}.deadline"] = "plugin default"
    if tier.capacity is None and plugin.default_capacity_bytes is not None:
        origins[f"{path}.capacity"] = "plugin default"
    return origins


def _defaulted_options(options: type[Any], given: Mapping[str, object], path: str) -> dict[str, Origin]:
    return {f"{path}.{option.name}": "plugin default" for option in option_fields(options) if option.name not in given}


def _resolve_codecs(config: Config, registry: Registry, origins: dict[str, Origin]) -> dict[str, Any]:
    """Read the options of every codec that has a section or that a tier names."""
    resolved: dict[str, Any] = {}
    for name in {**config.codecs, **dict.fromkeys(tier.codec for tier in config.l2 if tier.codec != "auto")}:
        given = config.codecs.get(name)
        place = Place(config.source).key("codecs").key(name)
        plugin = _codec_of_section(name, place, registry) if given is not None else registry.codec(name)
        if plugin.options is None:
            if given is not None:
                raise place.wrong(given, f"no such section: codec {name!r} has no options", secret=True)
            continue
        origins |= _defaulted_options(plugin.options, given or {}, place.path)
        resolved[name] = _read_options(plugin, plugin.options, given or {}, place)
    return resolved


def _codec_of_section(name: str, place: Place, registry: Registry) -> CodecPlugin:
    try:
        return registry.codec(name)
    except PluginNotFoundError as e:
        raise place.unknown(None, registry.names("codec"), secret=True) from e
    except PluginError as e:
        raise type(e)(f"{place.source}: {place.path}: {e}") from e


def _resolve(tier: TierConfig, plugin: BackendPlugin, deadline_s: float, place: Place) -> TierConfig:
    default_s = deadline_s if plugin.default_deadline_s is None else plugin.default_deadline_s
    return replace(
        tier,
        capacity=plugin.default_capacity_bytes if tier.capacity is None else tier.capacity,
        admit=tier.admit or plugin.default_admit,
        deadline=default_s if tier.deadline is None else tier.deadline,
        options=_read_options(plugin, plugin.options, tier.options, place, siblings=TIER_KEYS),
    )


def _read_options(
    plugin: BackendPlugin | CodecPlugin,
    options: type[Any],
    values: Mapping[str, object],
    place: Place,
    *,
    siblings: frozenset[str] = frozenset(),
) -> Any:
    fields = option_fields(options)
    read = read_section(fields, values, place, siblings=siblings, hint=top_level_hint)
    problem = ""
    try:
        return options(**read)
    except (ValueError, TypeError) as e:  # what the dataclass's __post_init__ finds
        problem = str(e)
    secrets = [str(read[option.name]) for option in fields if option.secret and read.get(option.name)]
    # Outside the except block: the original exception could show a secret in a traceback.
    kind = "backend" if isinstance(plugin, BackendPlugin) else "codec"
    msg = f"{place.source}: {place.path} ({kind} {plugin.name!r}): {without_secrets(problem, secrets)}"
    raise ConfigError(msg)

"""The whole config as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from kvstore.config.place import Place
from kvstore.config.schema import as_object, plain, read_value
from kvstore.config.sections import (
    TOP_LEVEL_KEYS,
    DefaultsConfig,
    GateConfig,
    L1Config,
    TierConfig,
    defaults_fields,
    gate_fields,
    l1_fields,
    read_core_section,
    split_tier,
    tier_fields,
)
from kvstore.config.toml_text import toml_document
from kvstore.plugins.options import OptionField, option_fields

Origin = Literal["file", "default", "plugin default"]

_NAMES: Final = OptionField(name="", form="strings")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that decides how a cache is built.

    Attributes:
        l1: The cache in memory.
        defaults: What holds for every tier.
        l2: Tiers in lookup order, fastest first.
        plugins: Plugins to load besides those that tiers, codecs and L1 name: observers.
        blocked_plugins: Plugins that must not be loaded.
        gate: When to compute blocks instead of loading them.
        codecs: Options of codecs by codec name: a mapping, or an instance of the plugin's dataclass.
        source: The file it came from, for messages.
        origins: Key path to where its value came from; what is missing here is a default.

    Example:
        >>> config = Config(l1=L1Config(capacity=1 << 30), l2=(TierConfig(backend="memory"),))
        >>> Config.from_mapping(config.to_dict()) == config
        True
    """

    l1: L1Config = field(default_factory=L1Config)
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    l2: tuple[TierConfig, ...] = ()
    plugins: tuple[str, ...] = ()
    blocked_plugins: tuple[str, ...] = ()
    gate: GateConfig = field(default_factory=GateConfig)
    # Not in repr: options may hold secrets.
    codecs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    source: str = field(default="mapping", compare=False)
    origins: Mapping[str, Origin] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "mapping") -> Self:
        """Read a config as TOML would give it, all keys of the core checked.

        The backends' own keys are kept as they are in :attr:`TierConfig.options`, those of codecs in
        :attr:`codecs`; :func:`kvstore.config.load_config` checks those too.

        Args:
            values: Nested mappings; values as in TOML, or already of the dataclass's types.
            source: The file's name, for messages.

        Raises:
            ConfigError: A value is missing, wrong or contradicts another one.
            UnknownKeyError: A key is not in the schema.
        """
        root = Place(source)
        as_object(values, root, "a mapping")
        for name in values:
            if name not in TOP_LEVEL_KEYS:
                raise root.key(name).unknown(values[name], TOP_LEVEL_KEYS)
        l1, defaults, gate, l2 = (root.key(name) for name in ("l1", "defaults", "gate", "l2"))
        l1_values = as_object(values.get("l1", {}), l1, "a table: [l1]")
        defaults_values = as_object(values.get("defaults", {}), defaults, "a table: [defaults]")
        gate_values = as_object(values.get("gate", {}), gate, "a table: [gate]")
        tier_values = _tier_values(values.get("l2", ()), l2)
        config = cls(
            l1=L1Config(**read_core_section(l1_fields(), l1_values, l1)),
            defaults=DefaultsConfig(**read_core_section(defaults_fields(), defaults_values, defaults)),
            l2=_named([_read_tier(tier, l2.item(i)) for i, tier in enumerate(tier_values)], l2),
            plugins=read_value(_NAMES, values.get("plugins", ()), root.key("plugins")),
            blocked_plugins=read_value(_NAMES, values.get("blocked_plugins", ()), root.key("blocked_plugins")),
            gate=GateConfig(**read_core_section(gate_fields(), gate_values, gate)),
            codecs=MappingProxyType(_codec_values(values.get("codecs", {}), root.key("codecs"))),
            source=source,
            origins=MappingProxyType(dict.fromkeys(_paths(values), "file")),
        )
        if not config.l2 and not config.l1.enabled:
            raise l1.key("enabled").wrong(value=False, expected="true, or at least one [[l2]] tier", problem="no tier")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the config as TOML would hold it, secrets included; settings of None are left out."""
        l2 = [_section(tier_fields(), tier) | _options(tier.options) for tier in self.l2]
        return {
            "plugins": list(self.plugins),
            "blocked_plugins": list(self.blocked_plugins),
            "l1": _section(l1_fields(), self.l1),
            "defaults": _section(defaults_fields(), self.defaults),
            "gate": _section(gate_fields(), self.gate),
            "codecs": {name: _options(options) for name, options in self.codecs.items()},
            "l2": l2,
        }

    def to_toml(self) -> str:
        """Return :meth:`to_dict` as a TOML document, secrets included."""
        return toml_document({name: value for name, value in self.to_dict().items() if value not in ([], {})})


def _section(fields: Sequence[OptionField], section: Any) -> dict[str, Any]:
    values = {option.name: plain(option, getattr(section, option.name)) for option in fields}
    return {name: value for name, value in values.items() if value is not None}


def _options(options: Any) -> dict[str, Any]:
    if is_dataclass(options) and not isinstance(options, type):
        return _section(option_fields(type(options)), options)
    return {} if options is None else dict(options)


def _tier_values(values: object, place: Place) -> list[Mapping[str, object]]:
    if not isinstance(values, list | tuple):
        raise place.wrong(values, "an array of tables: write [[l2]], once for each tier")
    return [as_object(value, place.item(i), "a table") for i, value in enumerate(values)]


def _codec_values(values: object, place: Place) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name, own in as_object(values, place, "tables: [codecs.NAME]").items():
        section = _options(own) if is_dataclass(own) else own
        if not isinstance(section, Mapping):
            raise place.key(name).wrong(own, f"a table: [codecs.{name}]", secret=True)
        sections[name] = dict(section)
    return sections


def _read_tier(values: Mapping[str, object], place: Place) -> TierConfig:
    core, own = split_tier(values)
    return TierConfig(**read_core_section(tier_fields(), core, place), options=own)


def _named(tiers: Sequence[TierConfig], place: Place) -> tuple[TierConfig, ...]:
    """Give every tier a name of its own; those given by the user must be unique as they are."""
    given = [tier.name for tier in tiers]
    for i, name in enumerate(given):
        if name and name in given[:i]:
            raise place.item(i).key("name").wrong(name, f"another name: l2[{given.index(name)}] has it")
    taken = {name for name in given if name}
    named: list[TierConfig] = []
    for tier in tiers:
        name, number = tier.name or tier.backend, 1
        while not tier.name and name in taken:
            number += 1
            name = f"{tier.backend}-{number}"
        taken.add(name)
        named.append(replace(tier, name=name))
    return tuple(named)


def _paths(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the key paths of all plain values."""
    paths: list[str] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            paths += _paths(value, f"{path}.")
        elif name == "l2" and not prefix:
            for i, tier in enumerate(value):
                paths += _paths(tier, f"{path}[{i}].")
        else:
            paths.append(path)
    return paths

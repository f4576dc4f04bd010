"""The settings that are in force, and where each one came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.config.model import Config, Origin
from kvstore.config.place import HIDDEN
from kvstore.config.schema import plain, text
from kvstore.config.sections import defaults_fields, gate_fields, l1_fields, tier_fields
from kvstore.plugins.options import OptionField, option_fields


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of ``kvstore config check``.

    Attributes:
        path: Key path such as ``l2[0].capacity``.
        value: Plain value, for JSON; None when there is none; ``"***"`` for a secret.
        text: The value as TOML text with units, ``-`` for none.
        origin: ``"file"``, ``"default"`` or ``"plugin default"``.
        doc: What the setting is for.
    """

    path: str
    value: Any
    text: str
    origin: Origin
    doc: str


def effective(config: Config) -> list[Setting]:
    """List every setting of a config that :func:`kvstore.config.load_config` returned."""
    names = OptionField(name="", form="strings")
    settings = [
        _setting(config, "plugins", names, config.plugins),
        _setting(config, "blocked_plugins", names, config.blocked_plugins),
    ]
    settings += _section(config, "l1", l1_fields(), config.l1)
    settings += _section(config, "defaults", defaults_fields(), config.defaults)
    settings += _section(config, "gate", gate_fields(), config.gate)
    for name, options in config.codecs.items():
        settings += _section(config, f"codecs.{name}", option_fields(type(options)), options)
    for i, tier in enumerate(config.l2):
        settings += _section(config, f"l2[{i}]", tier_fields(), tier)
        settings += _section(config, f"l2[{i}]", option_fields(type(tier.options)), tier.options)
    return settings


def _section(config: Config, path: str, fields: Sequence[OptionField], section: Any) -> Iterator[Setting]:
    for option in fields:
        yield _setting(config, f"{path}.{option.name}", option, getattr(section, option.name))


def _setting(config: Config, path: str, option: OptionField, value: Any) -> Setting:
    origin = config.origins.get(path, "default")
    if option.secret and value is not None:
        return Setting(path, HIDDEN, HIDDEN, origin, option.doc)
    return Setting(path, plain(option, value), text(option, value), origin, option.doc)

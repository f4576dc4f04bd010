"""The commented config that ``kvstore init`` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kvstore.config.schema import expectation, text
from kvstore.config.sections import DefaultsConfig, defaults_fields, gate_fields, l1_fields, tier_fields
from kvstore.errors import ConfigError
from kvstore.plugins import BackendPlugin, Registry
from kvstore.plugins.options import Form, OptionField, option_fields

_WIDTH: Final = 96

_HEADER: Final = """\
# kvstore configuration.  Lines such as "# key = value" show the default, or an example where there is none:
# remove the "# " to set the key.
# Check it with:  kvstore config check FILE
# Use it with:    KVCache.open("FILE", ...), or set KVSTORE_CONFIG=FILE
#
# plugins = []            # observers to load, such as a metrics exporter
# blocked_plugins = []    # installed plugins that must not be loaded
"""

_PLACEHOLDERS: Final[dict[Form, Any]] = {
    "str": "change-me",
    "int": 1,
    "float": 1.0,
    "bool": False,
    "bytes": 1 << 30,
    "seconds": 1.0,
    "strings": ["change-me"],
}


def render_template(
    backend: str = "lmdb",
    path: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> str:
    """Return a commented TOML document with one tier, which ``load_config`` accepts as it is.

    Args:
        backend: Plugin of the tier; it is loaded, because its options are listed too.
        path: The backend's option of that name, for those that keep data in a directory.
        options: Other options to write; required ones that are missing get a placeholder.
        registry: Where the plugin comes from; None for those that are installed.

    Raises:
        ConfigError: The backend has no option of a given name.
        PluginError: The backend cannot be used.
    """
    plugin = (Registry.discover() if registry is None else registry).backend(backend)
    own = option_fields(plugin.options)
    given = dict(options or {}) | ({} if path is None else {"path": path})
    for name in given:
        if name not in {option.name for option in own}:
            known = ", ".join(option.name for option in own) or "none"
            msg = f"backend {backend!r} has no option {name!r}; its options: {known}"
            raise ConfigError(msg)
    parts = [
        _HEADER,
        "[l1]  # the cache in memory",
        *_keys(l1_fields(), {}),
        "[defaults]",
        *_keys(defaults_fields(), {}),
        "[gate]  # load or recompute",
        *_keys(gate_fields(), {}),
    ]
    return "\n".join([*parts, *_tier(plugin, given)])


def _tier(plugin: BackendPlugin, given: Mapping[str, Any]) -> list[str]:
    own = option_fields(plugin.options)
    core = [option for option in tier_fields() if option.name != "backend"]
    examples = {
        "name": plugin.name,
        "capacity": plugin.default_capacity_bytes or 100 << 30,
        "admit": plugin.default_admit,
        "deadline": plugin.default_deadline_s or DefaultsConfig().deadline,
        "queue": 1 << 30,
        "workers": 4,
    }
    return [
        "# Tiers behind L1, asked in this order: fastest first.  Add [[l2]] sections for more.",
        "[[l2]]",
        f'backend = "{plugin.name}"  # {plugin.summary}',
        "",
        f"# Options of {plugin.name!r}" if own else f"# {plugin.name!r} has no options of its own.",
        *_keys(own, given),
        "# Options that every tier has",
        *_keys(core, {}, examples),
    ]


def _keys(
    fields: Sequence[OptionField], given: Mapping[str, Any], examples: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    lines: list[str] = []
    for option in fields:
        doc = option.doc or f"Takes {expectation(option)}."
        lines += textwrap.wrap(doc, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        if option.name in given or option.required:
            lines.append(f"{option.name} = {text(option, given.get(option.name, _placeholder(option)))}")
        else:
            shown = examples.get(option.name, option.default)
            if shown is None:
                lines.append(f"# {option.name} is not set; it takes {expectation(option)}")
            else:
                lines.append(f"# {option.name} = {text(option, shown)}")
    return [*lines, ""]


def _placeholder(option: OptionField) -> Any:
    return option.convert(option.choices[0]) if option.form == "choice" else _PLACEHOLDERS[option.form]

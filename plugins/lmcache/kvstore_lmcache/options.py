"""What can be set in LMCache's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.config.place import Place
from kvstore.config.schema import read_section
from kvstore.engines.store_config import ConfigOption, check_config_option
from kvstore.errors import ConfigError
from kvstore.plugins.options import option_fields
from kvstore.types import Seconds, option

_CONFIG: Final = "config"  # not in the schema: its value is a whole config of its own

# Keys of a remote storage plugin that LMCache reads itself.
_LMCACHE_KEYS: Final = frozenset({"module_path", "class_name"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the connector and of the L2 adapter.

    Attributes:
        config: A kvstore config: path of a TOML file or an inline mapping; None for the file that
            the environment variable ``KVSTORE_CONFIG`` names.
        revision: Fingerprint of the weights; None to take it from the model's folder, if the model's
            name is one.
        text_config: Name of the model's configuration; None to take it from the folder likewise.
        kv_scales: Digest of the scales of 8-bit KV.
        salt: Isolates a tenant, besides LMCache's own tags and salts.
        workers: Threads that read, and as many that write; at least 1.
        put_timeout: Longest time that one store waits for its blocks to be written.
    """

    config: ConfigOption = field(default=None, repr=False)
    revision: str | None = option(None, doc="Fingerprint of the weights, instead of the one of the model's folder.")
    text_config: str | None = option(None, doc="Name of the model's configuration, instead of its fingerprint.")
    kv_scales: str | None = option(None, doc="Digest of the scales of 8-bit KV.")
    salt: str | None = option(None, doc="Isolates a tenant: nothing is shared with another salt.", secret=True)
    workers: int = option(4, doc="Threads that read, and as many that write.")
    put_timeout: Seconds = option(30.0, doc="Longest time that one store waits for its chunks to be written.")

    def __post_init__(self) -> None:
        for name in ("revision", "text_config", "kv_scales", "salt"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} = '': expected text, or leave the option out")
        if self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: expected at least 1")
        if not 0 < self.put_timeout <= 3600:
            raise ConfigError(f"put_timeout = {self.put_timeout}: expected above 0 and at most an hour")


def read_options(given: Mapping[str, Any], source: str) -> Options:
    """Read the options as the user wrote them; an unknown key is an error.

    Args:
        given: Option names and values.
        source: Where they stand, for messages.

    Raises:
        ConfigError: A key is unknown or a value is wrong; the message names both.
    """
    place = Place(source)
    config = check_config_option(given.get(_CONFIG), place)
    values = {name: value for name, value in given.items() if name != _CONFIG}
    read = read_section(option_fields(Options, skip=(_CONFIG,)), values, place, siblings=(_CONFIG,))
    try:
        return Options(config=config, **read)
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from e


def plugin_options(extra_config: Mapping[str, Any] | None, plugin_name: str) -> Options:
    """Read the options of a remote storage plugin from LMCache's ``extra_config``.

    Args:
        extra_config: As in LMCache's configuration; holds ``remote_storage_plugin.<name>.<option>``.
        plugin_name: Name of the plugin, such as ``"kvstore"`` or ``"kvstore.archive"``.

    Raises:
        ConfigError: A key is unknown or a value is wrong.
    """
    prefix = f"remote_storage_plugin.{plugin_name}."
    given = {
        key[len(prefix) :]: value
        for key, value in (extra_config or {}).items()
        # "kvstore" must not take the keys of its sibling "kvstore.archive".
        if key.startswith(prefix) and "." not in key[len(prefix) :]
    }
    own = {name: value for name, value in given.items() if name not in _LMCACHE_KEYS}
    return read_options(own, f"extra_config: remote_storage_plugin.{plugin_name}")


def plugin_name_of(extra_config: Mapping[str, Any] | None, class_name: str) -> str:
    """Find the plugin whose ``class_name`` is ours, where LMCache does not say its name.

    Raises:
        ConfigError: No plugin, or more than one, has this class.
    """
    prefix, suffix = "remote_storage_plugin.", ".class_name"
    names = [
        key[len(prefix) : -len(suffix)]
        for key, value in (extra_config or {}).items()
        if key.startswith(prefix) and key.endswith(suffix) and value == class_name
    ]
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} remote storage plugins have class_name {class_name!r} ({', '.join(names) or 'none'}), "
            "and LMCache does not tell the class its name; use class_name 'KVStoreConnectorAdapter' and names "
            "that begin with 'kvstore'"
        )
    return names[0]

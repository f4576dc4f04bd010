"""What can be set in vLLM's configuration: one dataclass per class that vLLM constructs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from kvstore.config.place import Place
from kvstore.config.schema import read_section
from kvstore.engines.store_config import ConfigOption, check_config_option
from kvstore.errors import ConfigError
from kvstore.plugins.naming import did_you_mean
from kvstore.plugins.options import option_fields
from kvstore.types import Seconds, option

logger = logging.getLogger("kvstore.vllm")

_CONFIG: Final = "config"  # not in the schema: its value is a whole config of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What tier and connector have in common; every field can be set in vLLM's JSON.

    Attributes:
        config: A kvstore config: path of a TOML file or an inline mapping; None for the file that
            the environment variable ``KVSTORE_CONFIG`` names.
        model: Name of the weights, instead of vLLM's model path.
        revision: Fingerprint of the weights, instead of the commit or the sampled bytes.
        weights_version: Version of weights that are updated in place; part of the revision.
        kv_scales: Digest of the scales of 8-bit KV.
        text_config: Name of the model's configuration, instead of the fingerprint of vLLM's.
        salt: Isolates a tenant: nothing is shared with another salt.
        allow_weak_hashes: Accept block hashes of a non-cryptographic algorithm.
    """

    config: ConfigOption = field(default=None, repr=False)
    model: str | None = option(None, doc="Name of the weights, instead of vLLM's model path.")
    revision: str | None = option(None, doc="Fingerprint of the weights, instead of the one that is found out.")
    weights_version: str | None = option(None, doc="Version of weights that are updated in place.")
    kv_scales: str | None = option(None, doc="Digest of the scales of 8-bit KV.")
    text_config: str | None = option(None, doc="Name of the model's configuration, instead of its fingerprint.")
    salt: str | None = option(None, doc="Isolates a tenant: nothing is shared with another salt.", secret=True)
    allow_weak_hashes: bool = option(default=False, doc="Accept block hashes of a non-cryptographic algorithm.")

    def __post_init__(self) -> None:
        for name in ("model", "revision", "weights_version", "kv_scales", "text_config", "salt"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} = '': expected text, or leave the option out")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions(EngineOptions):
    """Options of the tier: the other keys of its entry in ``secondary_tiers``.

    Attributes:
        workers: Threads that load and store; at least 1.
        lookup_ttl: Seconds for which an answer to a lookup is believed.
        lookup_timeout: Seconds after which a lookup without an answer counts as a miss.
        store_timeout: Seconds that a store waits for room in the write queues.
        on_reset: What a reset of vLLM's caches does to the store.
        enable_kv_events: Report stored and removed blocks to vLLM's KV events.
        locality: Where the medium is, for vLLM's KV events and tier filters.
        drain_timeout: Seconds that a reset or a shutdown waits for the transfers under way.
    """

    workers: int = option(4, doc="Threads that load and store blocks.")
    lookup_ttl: Seconds = option(30.0, doc="How long an answer to a lookup is believed; other processes write too.")
    lookup_timeout: Seconds = option(1.0, doc="How long a request waits for the answer to a lookup.")
    store_timeout: Seconds = option(5.0, doc="How long a store waits for room in the write queues.")
    on_reset: Literal["clear", "part", "keep"] = option(
        "clear",
        doc="What a reset of vLLM's caches (new weights, sleep) does: clear this namespace of the store, part from it, "
        "or nothing.",
    )
    enable_kv_events: bool = option(default=False, doc="Report stored and removed blocks to vLLM's KV events.")
    locality: Literal["LOCAL", "REMOTE"] | None = option(None, doc="Where the medium is, for vLLM's KV events.")
    drain_timeout: Seconds = option(30.0, doc="How long a shutdown waits for transfers that are under way.")

    def __post_init__(self) -> None:
        super(TierOptions, self).__post_init__()
        if self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: expected at least 1")


OptionsT = TypeVar("OptionsT", bound=EngineOptions)


def read_options(
    options: type[OptionsT], given: Mapping[str, Any], *, source: str, ignore: Collection[str] = ()
) -> OptionsT:
    """Read what vLLM's configuration says.

    Unknown keys are tolerated with one warning that names the nearest known ones: another version of
    vLLM may pass keywords of its own.  Wrong values are not.

    Args:
        options: :class:`EngineOptions` or a subclass.
        given: Keys as written by the user, or passed by vLLM.
        source: Where they stand, for messages, such as ``"secondary tier 'kvstore'"``.
        ignore: Keys that are read by somebody else.

    Raises:
        ConfigError: A value is wrong; the message names the key.
    """
    schema = option_fields(options, skip=(_CONFIG,))
    known = {one.name for one in schema} | {_CONFIG}
    unknown = sorted(name for name in given if name not in known and name not in ignore)
    if unknown:
        named = ", ".join(f"{name!r}{did_you_mean(name, known)}" for name in unknown)
        logger.warning("%s: ignored what it does not know: %s", source, named)
    values = read_section(schema, {name: given[name] for name in given if name in known - {_CONFIG}}, Place(source))
    config = check_config_option(given.get(_CONFIG), Place(source))
    try:
        return options(config=config, **values)
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from e

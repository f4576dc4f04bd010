"""The config's sections: their keys, defaults and documentation in one place."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvstore.backend import Durability
from kvstore.config.place import Place
from kvstore.config.schema import read_section
from kvstore.keyring import is_source
from kvstore.plugins import TIER_KEYS
from kvstore.plugins.descriptors import Admit
from kvstore.plugins.options import OptionField, option_fields
from kvstore.types import ByteSize, Seconds, option

MAX_DEADLINE_S: Final = 3600.0  # an engine that waits longer for cached KV would rather recompute

TOP_LEVEL_KEYS: Final = ("plugins", "blocked_plugins", "l1", "defaults", "gate", "codecs", "l2")

Pin = Literal["auto", "never"]

_DEVICE: Final = re.compile(r"cpu|cuda:[0-9]+", re.ASCII)
_SOURCES: Final = 'an array of "file:PATH", "env:NAME" or "call:MODULE:FUNCTION", with "ID=" in front of each'
_KEY_SOURCES: Final = frozenset({"record_keys"})
_TIER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class L1Config:
    """``[l1]``: the cache in memory.

    Attributes:
        enabled: Whether there is one; without it every read goes to the L2 tiers.
        capacity: Bytes, at least one block.
        device: Accelerator whose memory keeps copies of blocks: ``"cuda:N"``, or ``"cpu"`` for none.
        device_capacity: Bytes of such copies, at least one block.
        pin: Whether the memory is page-locked for an accelerator: ``"auto"`` or ``"never"``.
        policy: Name of an eviction policy plugin.
    """

    enabled: bool = option(default=True, doc="Keep blocks in memory in front of the L2 tiers.")
    capacity: ByteSize = option(4 << 30, doc="Memory for blocks, allocated when the cache is opened.")
    device: str = option("cpu", doc='Accelerator that keeps copies of blocks as well: "cuda:N", or "cpu" for none.')
    device_capacity: ByteSize = option(1 << 30, doc="Memory on that device, allocated when the cache is opened.")
    pin: Pin = option(
        "auto",
        doc="auto page-locks the memory when an accelerator is in use, which makes copies faster; never does not.",
    )
    policy: str = option("prefix-lru", doc="Eviction policy: prefix-lru, lru, fifo, s3fifo or a plugin's.")


@dataclass(frozen=True, slots=True)
class DefaultsConfig:
    """``[defaults]``: what holds for every tier that does not say otherwise.

    Attributes:
        deadline: Seconds that a public call may take, above 0, at most an hour.
        require_salt: Whether calls refuse keys that have no salt.
        record_keys: Sources of the keys that authenticate records, see :mod:`kvstore.keyring`: the
            first one writes, all of them read; none for records without tags.
    """

    deadline: Seconds = option(5.0, doc="Longest time that one call may take; what is not there by then is a miss.")
    require_salt: bool = option(
        default=False, doc="Refuse keys without a salt, where every tenant has to be isolated from the others."
    )
    record_keys: tuple[str, ...] = option(
        (),
        doc="Secret keys without which nobody can make a record that is believed, the one to write with first: "
        "file:PATH, env:NAME or call:MODULE:FUNCTION, each with its number as in 2=file:PATH.",
    )


@dataclass(frozen=True, slots=True)
class GateConfig:
    """``[gate]``: tiers are not asked for blocks that the engine computes faster than they are loaded.

    Attributes:
        enabled: Whether loads are declined at all.
        prefill_tokens_per_s: The engine's prefill speed, 0 or more; 0 when its connector measures it, or
            :meth:`KVCache.note_prefill <kvstore.KVCache.note_prefill>` is called: without any of them
            nothing is declined.
        margin: A load is declined when it takes more than so many times as long as computing, 0.1 to 100.
    """

    enabled: bool = option(default=True, doc="Do not load what the engine computes faster.")
    prefill_tokens_per_s: float = option(
        0.0, doc="Prefill speed of the engine; 0 to learn it from what the connector measures."
    )
    margin: float = option(
        1.0, doc="Decline a load that takes more than so many times as long as computing; 0.1 to 100."
    )


@dataclass(frozen=True, slots=True)
class TierConfig:
    """``[[l2]]``: one tier behind L1; tiers are asked in the order in which they are written.

    Attributes:
        backend: Name of a backend plugin.
        name: Of the tier, for statistics and messages; empty for the backend's name, with ``-2``,
            ``-3`` ... appended when that is taken.
        capacity: Bytes on the medium; None for the backend's default.
        codec: ``"auto"`` or the name of a codec plugin.
        admit: Which blocks the tier takes; None for the backend's default.
        deadline: Seconds that a call may spend on this tier; None for the backend's default or
            else :attr:`DefaultsConfig.deadline`.
        required: Whether the cache refuses to open when the tier cannot be opened.
        queue: Bytes of blocks waiting to be written; None for a quarter of L1.
        workers: Threads of the tier; None for the tier's default.
        durability: ``"durable"`` keeps what was reported as stored over a power loss.
        options: The backend's own keys: a mapping, or an instance of its options dataclass.
    """

    backend: str = option(doc="Name of the backend plugin.", required=True)
    name: str = option("", doc="Name of the tier in statistics and messages; the backend's name if not given.")
    capacity: ByteSize | None = option(None, doc="Space on the medium; the backend's default if not given.")
    codec: str = option("auto", doc='Codec of stored blocks: "auto" (the backend\'s choice), none, planes, ...')
    admit: Admit | None = option(
        None,
        doc="Blocks to take: all, hot ones (used twice), or those evicted from L1; the backend's default if not given.",
    )
    deadline: Seconds | None = option(
        None, doc="Longest time that a call may spend on this tier; the backend's or [defaults] if not given."
    )
    required: bool = option(default=True, doc="Refuse to open the cache when this tier cannot be opened.")
    queue: ByteSize | None = option(None, doc="Blocks waiting to be written; a quarter of L1 if not given.")
    workers: int | None = option(
        None,
        doc="Threads that read from this tier; 4 if not given, for LMDB and memory at most one per core, "
        "16 for media with threads of their own.",
    )
    durability: Durability = option("cache", doc="cache may lose the newest blocks on power loss, durable may not.")
    # Not in repr: options may hold secrets.
    options: Any = field(default_factory=dict, repr=False)


@functools.cache
def l1_fields() -> tuple[OptionField, ...]:
    """Return the keys of ``[l1]``."""
    return option_fields(L1Config)


@functools.cache
def defaults_fields() -> tuple[OptionField, ...]:
    """Return the keys of ``[defaults]``."""
    return option_fields(DefaultsConfig)


@functools.cache
def gate_fields() -> tuple[OptionField, ...]:
    """Return the keys of ``[gate]``."""
    return option_fields(GateConfig)


@functools.cache
def tier_fields() -> tuple[OptionField, ...]:
    """Return the core's keys of ``[[l2]]``."""
    return option_fields(TierConfig, skip=("options",))


def read_core_section(fields: tuple[OptionField, ...], values: Mapping[str, object], place: Place) -> dict[str, Any]:
    """Read keys of the core: types as the dataclass says, ranges as below.

    Raises:
        ConfigError: A value is wrong, a required key is missing or an unknown one is there.
    """
    for name in _KEY_SOURCES.intersection(values):
        given = values[name]
        if not isinstance(given, list | tuple) or not all(isinstance(text, str) and is_source(text) for text in given):
            # not shown: somebody may have written the key itself
            raise place.key(name).wrong(given, _SOURCES, secret=True)
    read = read_section(fields, values, place, hint=top_level_hint)
    for name, value in read.items():
        accepts, expected = _RANGES.get(name, (_anything, ""))
        if value is not None and not accepts(value):
            raise place.key(name).wrong(values[name], expected)
    return read


def top_level_hint(name: str) -> str:
    """Say where a key belongs that was written below the first table header."""
    if name not in TOP_LEVEL_KEYS:
        return ""
    return f"; {name!r} belongs to the top level: move it above the first [table]"


def split_tier(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Part a tier's keys into the core's and the backend's."""
    core = {name: value for name, value in values.items() if name in TIER_KEYS}
    return core, {name: value for name, value in values.items() if name not in TIER_KEYS}


def _anything(_: Any) -> bool:
    return True


_RANGES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "device": (lambda text: _DEVICE.fullmatch(text) is not None, '"cpu" or "cuda:N"'),
    "deadline": (lambda s: 0 < s <= MAX_DEADLINE_S, 'a duration above 0 and at most "1h"'),
    "prefill_tokens_per_s": (lambda speed: speed >= 0, "a number of at least 0"),
    "margin": (lambda factor: 0.1 <= factor <= 100, "a number from 0.1 to 100"),
    "workers": (lambda n: 1 <= n <= 1024, "an integer from 1 to 1024"),
    "name": (
        lambda text: not text or (_TIER_NAME.fullmatch(text) is not None and text != "l1"),
        'a name of letters, digits, "_", "." and "-" other than "l1"',
    ),
}

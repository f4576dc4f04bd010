"""What a plugin hands to the host: typed descriptors with lazy factories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from kvstore.backend import Backend, BackendContext, Finding
    from kvstore.codec import Codec
    from kvstore.eviction import EvictionPolicy

PLUGIN_API_VERSION: Final = 1
"""Version of this contract (hooks, descriptors, Backend, Codec and EvictionPolicy)."""

Admit = Literal["all", "hot", "evicted"]
"""Which blocks a tier takes: every put, those used a second time, or those about to leave L1."""

TIER_KEYS: Final = frozenset(
    {"name", "backend", "capacity", "codec", "admit", "deadline", "required", "queue", "workers", "durability"}
)
"""Keys of an ``[[l2]]`` section that belong to the core; no plugin option may have such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPlugin:
    """A storage medium that an ``[[l2]]`` section can name.

    Attributes:
        name: ``[a-z0-9-]+``, equal to the entry point's name; what ``backend = "..."`` says.
        options: Frozen dataclass, the schema of the backend's own config keys.  Declare its
            fields with :func:`kvstore.types.option`.
        factory: Makes an unopened backend; imports the driver.  Called once per tier and open.
        summary: One line for ``kvstore plugins list``.
        api_version: :data:`PLUGIN_API_VERSION` of the kvstore it was written for.
        default_codec: What ``codec = "auto"`` means for this medium.
        default_admit: Used when the tier does not say ``admit``.
        default_deadline_s: Seconds per call; None takes the config's ``defaults.deadline``.
        default_capacity_bytes: Used when the tier does not say ``capacity``; None for no bound.
        max_writers: Threads that may be in ``put_many`` at once, at least 1.
        raw_below: Under ``codec = "auto"``, store raw until this fraction of the capacity is used:
            for media whose reads are memory copies, where compression pays for room only.
        diagnose: Looks at a medium without opening the tier and explains what is wrong with it, for
            ``kvstore doctor``; must end within about 10 s and raise nothing.
    """

    name: str
    options: type[Any]
    factory: Callable[[], Backend]
    summary: str
    api_version: int = PLUGIN_API_VERSION
    default_codec: str = "planes"
    default_admit: Admit = "all"
    default_deadline_s: float | None = None
    default_capacity_bytes: int | None = None
    max_writers: int = 1
    raw_below: float = 0.0
    diagnose: Callable[[BackendContext], Sequence[Finding]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecPlugin:
    """A lossless segment codec that ``codec = "..."`` can name.

    Attributes:
        name: ``[a-z0-9-]+``, equal to the entry point's name.
        codec_id: Number in stored records, 0-65535, for life; 0-63 are kvstore's own.
        factory: Makes one instance; called once per worker thread, without arguments, or with a
            :class:`~kvstore.codec.CodecContext` when there are ``options``.
        summary: One line for ``kvstore plugins list``.
        api_version: :data:`PLUGIN_API_VERSION` of the kvstore it was written for.
        options: Frozen dataclass, the schema of the config's ``[codecs.NAME]`` section; None for a
            codec without settings.
    """

    name: str
    codec_id: int
    factory: Callable[..., Codec]
    summary: str
    api_version: int = PLUGIN_API_VERSION
    options: type[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPlugin:
    """An L1 eviction policy that ``l1.policy`` can name.

    Attributes:
        name: ``[a-z0-9-]+``, equal to the entry point's name.
        factory: Makes one instance for an L1 of that many blocks (at least 1).
        summary: One line for ``kvstore plugins list``.
        api_version: :data:`PLUGIN_API_VERSION` of the kvstore it was written for.
    """

    name: str
    factory: Callable[[int], EvictionPolicy]
    summary: str
    api_version: int = PLUGIN_API_VERSION


Descriptor: TypeAlias = BackendPlugin | CodecPlugin | PolicyPlugin
Kind = Literal["backend", "codec", "policy", "observer"]
Status = Literal["active", "installed", "blocked", "broken", "incompatible", "conflict"]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One row of ``kvstore plugins list``.

    Attributes:
        name: The plugin's (entry point's) name.
        distribution: Distribution that provides it; several, comma-separated, in a conflict.
        version: Its version, likewise.
        target: The hooks module, likewise.
        status: ``active`` (loaded), ``installed`` (not loaded yet), ``blocked``, ``broken``,
            ``incompatible`` or ``conflict``.
        detail: Summary of an active plugin, or why it cannot be used.
        kinds: What it provides; empty until it was loaded.
    """

    name: str
    distribution: str
    version: str
    target: str
    status: Status
    detail: str = ""
    kinds: tuple[Kind, ...] = ()

"""Runs plugin factories and checks what they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.backend import Backend
from kvstore.codec import Codec, CodecContext
from kvstore.errors import ConfigError, PluginLoadError
from kvstore.eviction import EvictionPolicy
from kvstore.plugins.descriptors import BackendPlugin, CodecPlugin, Descriptor, PolicyPlugin
from kvstore.plugins.validate import interface_problems

_C = TypeVar("_C")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``kvstore plugins check``.

    Attributes:
        ok: False when the plugin cannot be used as it is.
        subject: What was looked at.
        detail: What was found.
    """

    ok: bool
    subject: str
    detail: str


def make_backend(plugin: BackendPlugin, who: str) -> Backend:
    """Make an unopened backend.

    Args:
        plugin: Its descriptor.
        who: The plugin, for messages.

    Raises:
        PluginLoadError: The factory raised, or its result does not fulfil the contract.
    """
    return _make(plugin.factory, Backend, who)  # type: ignore[type-abstract]


def make_codec(plugin: CodecPlugin, who: str, context: CodecContext | None) -> Codec:
    """Make a codec and check that it is the one the descriptor announces.

    Args:
        plugin: Its descriptor.
        who: The plugin, for messages.
        context: What it is made from if it has options.

    Raises:
        ConfigError: Its options do not let it work.
        PluginLoadError: As :func:`make_backend`.
    """
    codec = _make(plugin.factory, Codec, who, *(() if context is None else (context,)))  # type: ignore[type-abstract]
    announced, actual = (plugin.name, plugin.codec_id), (codec.name, codec.codec_id)
    if actual != announced:
        msg = f"{who} is broken: its descriptor announces codec {announced}, its factory made codec {actual}"
        raise PluginLoadError(msg)
    return codec


def make_policy(plugin: PolicyPlugin, who: str, capacity_blocks: int) -> EvictionPolicy:
    """Make an eviction policy for that many blocks; as :func:`make_backend`."""
    return _make(plugin.factory, EvictionPolicy, who, capacity_blocks)  # type: ignore[type-abstract]


def default_options(plugin: CodecPlugin) -> Any:
    """Make a codec's options as they are without a section in the config; None when it has none.

    Raises:
        ConfigError: There are options without a default.
    """
    if plugin.options is None:
        return None
    try:
        return plugin.options()
    except (TypeError, ValueError) as e:
        msg = f"codec {plugin.name!r} cannot do without a section [codecs.{plugin.name}] in the config: {e}"
        raise ConfigError(msg) from e


def try_descriptor(descriptor: Descriptor, who: str, find: Callable[[str | int], Codec | None]) -> Finding:
    """Make what ``descriptor`` describes, opening nothing, and say how it went.

    Args:
        descriptor: Of a backend, codec or policy.
        who: The plugin, for messages.
        find: Finds other codecs, for one that wraps them.
    """
    kind = type(descriptor).__name__.removesuffix("Plugin").lower()
    subject = f"{kind} {descriptor.name}"
    try:
        detail = _made(descriptor, who, find)
    except ConfigError as e:  # not the plugin's fault: it needs settings, which a check does not have
        detail = f"works with settings only: {e}"
    except PluginLoadError as e:
        return Finding(ok=False, subject=subject, detail=str(e))
    return Finding(ok=True, subject=subject, detail=detail)


def _made(descriptor: Descriptor, who: str, find: Callable[[str | int], Codec | None]) -> str:
    if isinstance(descriptor, BackendPlugin):
        backend = make_backend(descriptor, who)
        return f"{type(backend).__name__}: {backend.capabilities.name or 'no capabilities'}"
    if isinstance(descriptor, CodecPlugin):
        options = default_options(descriptor)
        codec = make_codec(descriptor, who, None if options is None else CodecContext(options, find))
        return f"{type(codec).__name__}: codec id {descriptor.codec_id}"
    return type(make_policy(descriptor, who, 1)).__name__


def _make(factory: Callable[..., Any], contract: type[_C], who: str, *arguments: object) -> _C:
    try:
        made = factory(*arguments)
    except ConfigError:
        raise
    except Exception as e:
        msg = f"{who} is broken: making its {contract.__name__.lower()} raised {type(e).__name__}: {e}"
        raise PluginLoadError(msg) from e
    if not isinstance(made, contract):
        expected = f"{contract.__module__}.{contract.__name__}"
        msg = f"{who} is broken: its factory made {made!r}, which is no subclass of {expected}"
        raise PluginLoadError(msg)
    for problem in interface_problems(made, contract):
        msg = f"{who} is broken: {type(made).__name__}.{problem}"
        raise PluginLoadError(msg)
    return made

"""Runs plugin factories and checks what they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.backend import Backend
from kvstore.codec import Codec
from kvstore.errors import PluginLoadError
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


def make_codec(plugin: CodecPlugin, who: str) -> Codec:
    """Make a codec and check that it is the one the descriptor announces; as :func:`make_backend`."""
    codec = _make(plugin.factory, Codec, who)  # type: ignore[type-abstract]
    announced, actual = (plugin.name, plugin.codec_id), (codec.name, codec.codec_id)
    if actual != announced:
        msg = f"{who} is broken: its descriptor announces codec {announced}, its factory made codec {actual}"
        raise PluginLoadError(msg)
    return codec


def make_policy(plugin: PolicyPlugin, who: str, capacity_blocks: int) -> EvictionPolicy:
    """Make an eviction policy for that many blocks; as :func:`make_backend`."""
    return _make(plugin.factory, EvictionPolicy, who, capacity_blocks)  # type: ignore[type-abstract]


def try_descriptor(descriptor: Descriptor, who: str) -> Finding:
    """Make what ``descriptor`` describes, opening nothing, and say how it went."""
    kind = type(descriptor).__name__.removesuffix("Plugin").lower()
    subject = f"{kind} {descriptor.name}"
    try:
        detail = _made(descriptor, who)
    except PluginLoadError as e:
        return Finding(ok=False, subject=subject, detail=str(e))
    return Finding(ok=True, subject=subject, detail=detail)


def _made(descriptor: Descriptor, who: str) -> str:
    if isinstance(descriptor, BackendPlugin):
        backend = make_backend(descriptor, who)
        return f"{type(backend).__name__}: {backend.capabilities.name or 'no capabilities'}"
    if isinstance(descriptor, CodecPlugin):
        return f"{type(make_codec(descriptor, who)).__name__}: codec id {descriptor.codec_id}"
    return type(make_policy(descriptor, who, 1)).__name__


def _make(factory: Callable[..., Any], contract: type[_C], who: str, *arguments: int) -> _C:
    try:
        made = factory(*arguments)
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

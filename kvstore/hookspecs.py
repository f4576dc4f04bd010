"""What plugins may implement: registration and observation, never data.

A plugin is a module with functions of these names, each marked with :data:`hookimpl`, and one
entry point per plugin name in the group ``kvstore``::

    # kvstore_dirfiles/hooks.py
    from kvstore.hookspecs import hookimpl
    from kvstore.plugins import BackendPlugin


    @hookimpl
    def kvstore_register_backends():
        return [BackendPlugin(name="dirfiles", options=DirFilesOptions, factory=_make, summary="...")]

    # pyproject.toml
    # [project.entry-points.kvstore]
    # dirfiles = "kvstore_dirfiles.hooks"

Implementations are plain synchronous functions.  They take the parameters they need, by the names
given here, positionally or by keyword, without default values.  A hooks module must not import its
driver (lmdb, boto3, torch, ...) at module level: factories do that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from kvstore.events import CacheEvent, CacheInfo
    from kvstore.plugins.descriptors import BackendPlugin, CodecPlugin, PolicyPlugin

PROJECT: Final = "kvstore"
"""pluggy's project name, and the entry-point group."""

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a hooks module as the implementation of the hook of the same name."""


@hookspec
def kvstore_register_backends() -> Iterable[BackendPlugin]:  # type: ignore[empty-body]
    """Return the storage backends that this module provides.

    Called once per registry, in the thread that first asks for one of the module's plugin names
    (normally the one that opens a cache), under the registry's lock: do not call the registry.

    Returns:
        Descriptors.  Each needs an entry point of its own name that points at this module; the
        whole module is refused if one of them is malformed.  Nothing is opened or imported until
        a descriptor's factory runs.
    """


@hookspec
def kvstore_register_codecs() -> Iterable[CodecPlugin]:  # type: ignore[empty-body]
    """Return the lossless codecs that this module provides.

    Called when, where and as often as :func:`kvstore_register_backends`.

    Returns:
        Descriptors.  A codec id belongs to one codec for life; two codecs with one id are refused.
    """


@hookspec
def kvstore_register_policies() -> Iterable[PolicyPlugin]:  # type: ignore[empty-body]
    """Return the L1 eviction policies that this module provides.

    Called when, where and as often as :func:`kvstore_register_backends`.

    Returns:
        Descriptors, whose factories take the capacity in blocks.
    """


@hookspec
def kvstore_cache_opened(cache_info: CacheInfo) -> None:
    """Note that a cache was opened.

    Called once per opened cache, in the thread that opened it.  Historic: a plugin that is loaded
    later is told about the caches opened before it, oldest first, while it is loaded.  What it
    returns is ignored; what it raises is logged once and counted, and changes nothing for the
    cache or for other observers.

    Args:
        cache_info: The cache's id, tiers and block size.
    """


@hookspec
def kvstore_events(events: Sequence[CacheEvent]) -> None:
    """Note what happened to blocks: stored, removed, hit, miss, corrupt, tier state.

    Called with batches from a background thread of each open cache, a few times a second at most
    and only when something happened; never two at a time for one cache.  A slow observer delays
    later batches, not data calls.  What it returns is ignored; what it raises is logged once and
    counted.

    Args:
        events: In the order in which they happened, at least one.
    """

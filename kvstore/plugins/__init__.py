"""The plugin host: descriptors for plugin authors, the registry for everyone who opens a cache."""

from __future__ import annotations

from kvstore.plugins.descriptors import (
    PLUGIN_API_VERSION,
    TIER_KEYS,
    BackendPlugin,
    CodecPlugin,
    PluginInfo,
    PolicyPlugin,
)
from kvstore.plugins.registry import Registry

__all__ = [
    "PLUGIN_API_VERSION",
    "TIER_KEYS",
    "BackendPlugin",
    "CodecPlugin",
    "PluginInfo",
    "PolicyPlugin",
    "Registry",
]

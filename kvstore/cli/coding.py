"""What ``kvstore doctor`` looks at besides media: the codecs that a config sets up, and the secret keys it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.backend import Finding
from kvstore.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from kvstore.config import Config
    from kvstore.plugins import Registry


def coding_findings(config: Config, registry: Registry) -> list[Finding]:
    """Fetch the keys for records and make every codec with options, as opening a cache does.

    Keys are not shown.  Nothing is found where a config names neither.
    """
    from kvstore.l2.shelf import CodecShelf, Coding
    from kvstore.spec import BlockSpec

    any_spec = BlockSpec(layers=1, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")
    shelf = CodecShelf(registry, any_spec, bytes(16), Coding(config.codecs))
    findings = []
    if config.defaults.record_keys:
        findings.append(_tried("defaults.record_keys: the keys are available", lambda: Coding.of(config)))
    if config.codecs:
        names = ", ".join(repr(name) for name in config.codecs)
        findings.append(_tried(f"codecs: {names} can be made, with the keys that they name", shelf.check))
    return findings


def _tried(good: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except (ConfigError, PluginError) as e:
        return Finding("problem", str(e), "no cache opens until it is right; docs/how-to/encrypt-at-rest.md")
    return Finding("ok", good)

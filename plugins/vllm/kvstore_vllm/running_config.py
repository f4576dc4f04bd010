"""Finds the configuration of the vLLM engine that is being constructed."""

from __future__ import annotations

import sys
from typing import Any, Final

from kvstore.errors import ConfigError

_NAME: Final = "vllm_config"
_FRAMES: Final = 24  # from a tier's constructor to the connector's are 5 in vLLM 0.31 to 0.33


def find_vllm_config() -> Any:
    """The ``VllmConfig`` of the engine whose constructor is running.

    vLLM gives a tier its model's name, but neither its configuration (RoPE, overrides, quantization)
    nor its revision, without which the KV of different models would be mixed up.  The connector that
    constructs the tier has all of it, as an argument of that name, and so it is read from there.

    Raises:
        ConfigError: There is none: this version of vLLM constructs tiers in another way.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - the documented, if CPython-only, way to one's callers
    for _ in range(_FRAMES):
        candidate = frame.f_locals.get(_NAME)
        if hasattr(candidate, "model_config") and hasattr(candidate, "cache_config"):
            return candidate
        if frame.f_back is None:
            break
        frame = frame.f_back
    raise ConfigError(
        "the tier cannot tell which model it serves: this vLLM constructs tiers without its configuration at hand; "
        "use KVStoreConnector instead, or a version of vLLM that the reference names as tested"
    )

"""What stands in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from kvstore.errors import ConfigError

logger: Final = logging.getLogger(__name__)

SGLANG_KEYS: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
})  # fmt: skip
"""Keys of the same mapping that SGLang reads itself (0.5.23)."""

_SOURCE: Final = "hicache-storage-backend-extra-config"
# A key this like one of ours was meant to be it: "revison", "kv_scale". SGLang's own are known by name.
_SIMILAR: Final = 0.75


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's own options, checked.

    Attributes:
        config: The store: path of a TOML file or a mapping of the same form; None for the file that
            ``KVSTORE_CONFIG`` names.
        model: Name of the model in the namespace; SGLang's served model name if not given.
        revision: Which weights these are; found by itself for a local folder and a Hugging Face download.
        text_config: Digest of configuration that changes K; found by itself where there is a ``config.json``.
        kv_scales: Digest of the scales of scaled 8-bit KV that are not part of the weights.
        draft_revision: Which weights the draft model has, for speculative decoding.
        salt: Isolates everything this engine stores; SGLang's ``cache_salt`` isolates single requests.
    """

    config: str | Mapping[str, Any] | None = field(default=None, repr=False)
    model: str | None = None
    revision: str | None = None
    text_config: str | None = None
    kv_scales: str | None = None
    draft_revision: str | None = None
    salt: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """Read the mapping; keys of others are left alone, one that looks like a slip of ours is named in the log.

        Raises:
            ConfigError: One of our keys has a value of another type.
        """
        names = [one.name for one in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in (extra_config or {}).items():
            if name in names:
                values[name] = _checked(name, value)
            elif name not in SGLANG_KEYS:
                _warn_if_misspelt(name, names)
        return cls(**values)


def _checked(name: str, value: Any) -> Any:
    expected = "text"
    fits = isinstance(value, str) and value != ""
    if name == "config":
        expected = "the path of a TOML file, or a mapping of the same form"
        fits = fits or isinstance(value, Mapping)
    if not fits:
        shown = "a value that is not shown" if name == "salt" else repr(value)
        msg = f"{_SOURCE}: {name} = {shown} ({type(value).__name__}); expected {expected}"
        raise ConfigError(msg)
    return value


def _warn_if_misspelt(name: str, names: list[str]) -> None:
    close = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    if close:
        logger.warning("%s: unknown key %r is ignored; did you mean %r?", _SOURCE, name, close[0])

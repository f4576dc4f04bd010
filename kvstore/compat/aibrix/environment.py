"""AIBrix's environment variables, as far as they mean something here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kvstore.errors import ConfigError

PREFIX: Final = "AIBRIX_KV_CACHE_OL_"
DEFAULT_NAMESPACE: Final = "aibrix"

_POLICIES: Final = {"LRU": "lru", "FIFO": "fifo", "S3FIFO": "s3fifo"}
_ADMIT: Final = {"ALL": "all", "HOT": "hot", "EVICTED": "evicted"}
_CODECS: Final = {"": "auto", "ZSTD": "planes"}

_HERE: Final = "kvstore"
"""Folder below AIBrix's root, so that its own files stay alone."""

_STORAGE: Final = (
    "L1_CACHE_ENABLED",
    "L1_CACHE_EVICTION_POLICY",
    "L1_CACHE_CAPACITY_GB",
    "DEVICE",
    "L2_CACHE_BACKEND",
    "L2_CACHE_COMPRESSION",
    "L2_CACHE_INGESTION_TYPE",
    "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS",
    "ROCKSDB_ROOT",
    "SHFS_ROOT",
)
"""Variables that a kvstore config stands in for."""

_ALWAYS: Final = ("BLOCK_SIZE", "CHUNK_SIZE", "MAX_SEQ_LEN", "L2_CACHE_NAMESPACE", "TIME_MEASUREMENT_ENABLED")
"""Variables that hold with any config."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the variables say.

    Attributes:
        chunk_tokens: Tokens of a chunk of ``cache_chunk_keys``, before it is fitted to the blocks.
        max_sequence_tokens: Tokens of a sequence beyond which nothing is stored; None is no bound.
        namespace: Text that separates installations.
        measures_time: Whether metrics hold times.
        storage: The L1 and L2 settings in the form of a kvstore config.
        inflight_tokens: Tokens that may wait to be written; None is the default.
        unused: Variables that are set and change nothing, sorted.
    """

    chunk_tokens: int = 512
    max_sequence_tokens: int | None = None
    namespace: str = DEFAULT_NAMESPACE
    measures_time: bool = True
    storage: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inflight_tokens: int | None = None
    unused: tuple[str, ...] = ()


def block_tokens_override(environ: Mapping[str, str]) -> int | None:
    """Tokens per cache block that replace the engine's, None if not set.

    Raises:
        ConfigError: The value is no power of two.
    """
    size = _int(environ, "BLOCK_SIZE", -1)
    if size <= 0:
        return None
    if size & (size - 1):
        raise _wrong("BLOCK_SIZE", str(size), "a power of two")
    return size


def read_environment(environ: Mapping[str, str], *, with_storage: bool) -> Environment:
    """Read the variables.

    Args:
        environ: Such as ``os.environ``.
        with_storage: Whether L1 and L2 are to be made from them; otherwise a config says what they
            are, and those variables count as unused.

    Raises:
        ConfigError: A value is wrong, or asks for a medium that has no equivalent.
    """
    max_sequence_tokens = _int(environ, "MAX_SEQ_LEN", -1)
    inflight_tokens = _int(environ, "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS", 0)
    used = {*_ALWAYS, *(_STORAGE if with_storage else ())}
    names = (name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX))
    return Environment(
        chunk_tokens=_int(environ, "CHUNK_SIZE", 512),
        max_sequence_tokens=max_sequence_tokens if max_sequence_tokens > 0 else None,
        namespace=_text(environ, "L2_CACHE_NAMESPACE", DEFAULT_NAMESPACE).lower() or DEFAULT_NAMESPACE,
        measures_time=_flag(environ, "TIME_MEASUREMENT_ENABLED"),
        storage=MappingProxyType(_storage(environ) if with_storage else {}),
        inflight_tokens=inflight_tokens if with_storage and inflight_tokens > 0 else None,
        unused=tuple(sorted(PREFIX + name for name in names if name not in used)),
    )


def _storage(environ: Mapping[str, str]) -> dict[str, Any]:
    l1: dict[str, Any] = {"enabled": _flag(environ, "L1_CACHE_ENABLED")}
    if l1["enabled"]:
        l1["capacity"] = _gib(environ, "L1_CACHE_CAPACITY_GB", 10.0)
        if policy := _text(environ, "L1_CACHE_EVICTION_POLICY", "").upper():
            l1["policy"] = _one_of("L1_CACHE_EVICTION_POLICY", policy, _POLICIES)
        device = _text(environ, "DEVICE", "cpu").lower()
        l1["device"] = "cpu" if device.partition(":")[0] == "cpu" else device
    medium = _medium(environ)
    if medium is None:
        return {"l1": l1}
    ingestion = _text(environ, "L2_CACHE_INGESTION_TYPE", "HOT").upper()
    tier = {
        **medium,
        "codec": _one_of("L2_CACHE_COMPRESSION", _text(environ, "L2_CACHE_COMPRESSION", "").upper(), _CODECS),
        "admit": _one_of("L2_CACHE_INGESTION_TYPE", ingestion, _ADMIT) if l1["enabled"] else "all",
    }
    return {"l1": l1, "l2": [tier]}


def _medium(environ: Mapping[str, str]) -> dict[str, Any] | None:
    backend = _text(environ, "L2_CACHE_BACKEND", "").upper()
    if not backend:
        return None
    if backend == "ROCKSDB":
        return {"backend": "lmdb", "path": _folder(environ, "ROCKSDB_ROOT", "rocksdb")}
    if backend == "SHFS":
        # A file per block, as AIBrix has it: a pack is found by who asks for all of it, and its callers may not.
        return {"backend": "nvme", "layout": "tree", "pack": 1, "path": _folder(environ, "SHFS_ROOT", "shfs")}
    if backend == "MOCK":
        return {"backend": "memory"}
    raise _wrong(
        "L2_CACHE_BACKEND",
        backend,
        "ROCKSDB (stored with LMDB), SHFS (a tree of files) or MOCK (memory); for any other medium, such as an S3 "
        "bucket, name a kvstore config in KVSTORE_CONFIG or with kvstore.compat.aibrix.configure(...)",
    )


def _folder(environ: Mapping[str, str], name: str, default: str) -> str:
    root = _text(environ, name, "") or os.path.join("~", ".kv_cache_ol", default)  # noqa: PTH118 - '~' is the backend's
    return os.path.join(root, _HERE)  # noqa: PTH118


def _text(environ: Mapping[str, str], name: str, default: str) -> str:
    return environ.get(PREFIX + name, default).strip()


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return _text(environ, name, "1").lower() in {"1", "true"}


def _int(environ: Mapping[str, str], name: str, default: int) -> int:
    text = _text(environ, name, str(default))
    try:
        return int(text)
    except ValueError:
        raise _wrong(name, text, "an integer") from None


def _gib(environ: Mapping[str, str], name: str, default: float) -> int:
    text = _text(environ, name, str(default))
    try:
        nbytes = int(float(text) * (1 << 30))
    except ValueError:
        nbytes = 0
    if nbytes <= 0:
        raise _wrong(name, text, "a number of GiB above 0")
    return nbytes


def _one_of(name: str, text: str, values: Mapping[str, str]) -> str:
    if text not in values:
        raise _wrong(name, text, " or ".join(value or "nothing" for value in values))
    return values[text]


def _wrong(name: str, text: str, expected: str) -> ConfigError:
    return ConfigError(f"{PREFIX}{name} is {text!r}; expected {expected}")

"""Stored names as object keys, and back."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

NAME_BYTES: Final = 49
"""Length of the core's names: name prefix 16, kind 1, digest 32."""

SEQUENCE_BYTES: Final = 17
"""What the names of one sequence of blocks have in common: name prefix and kind."""

OTHER: Final = "other/"
_CORE_KEY: Final = re.compile(r"([0-9a-f]{2})/([0-9a-f]{32})/([0-9a-f]{2})(\1[0-9a-f]{62})\Z")
_OTHER_KEY: Final = re.compile(r"other/([0-9a-f]{2})/(\1[0-9a-f]{62})\Z")


def key_of(name: bytes) -> str:
    """Object key of a name: spread by the digest's first byte, grouped by name prefix below it.

    Names that the core did not make are hashed, so any bytes are safe in a path.
    """
    if len(name) == NAME_BYTES:
        digest = name[17:].hex()
        return f"{digest[:2]}/{name[:16].hex()}/{name[16]:02x}{digest}"
    digest = blake2b(name, digest_size=32).hexdigest()
    return f"{OTHER}{digest[:2]}/{digest}"


def name_of(key: str) -> bytes | None:
    """The name behind a key; None when the key does not tell it."""
    match = _CORE_KEY.match(key)
    return None if match is None else bytes.fromhex(match[2] + match[3] + match[4])


def holds_records(key: str) -> bool:
    """Whether the key is one that records are stored under; other keys are notes or foreign."""
    return bool(_CORE_KEY.match(key) or _OTHER_KEY.match(key))


def fan_out(name_prefix: bytes, spread: int) -> str:
    """Key prefix of all core names that start with 16 known bytes and have that first digest byte."""
    return f"{spread:02x}/{name_prefix.hex()}/"


def epoch_key(namespace: bytes) -> str:
    """Where a namespace's epoch lies."""
    return f"epochs/{namespace.hex()}"


DESCRIPTIONS: Final = "namespaces/"


def description_key(namespace: bytes) -> str:
    """Where a namespace's readable description lies."""
    return f"{DESCRIPTIONS}{namespace.hex()}.json"


DROPS: Final = "drops/"


def drop_key(name_prefix: bytes) -> str:
    """Where the wish to drop a name prefix is kept until it is fulfilled; the prefix is the body."""
    return DROPS + blake2b(name_prefix, digest_size=16).hexdigest()

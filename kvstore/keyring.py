"""Secret keys with numbers: where they come from, which one writes, which ones still read.

A source is text, so that configs hold no secrets::

    file:/etc/kvstore/key          a file of 32 bytes, or of 64 hex digits
    env:KVSTORE_KEY                an environment variable of 64 hex digits
    call:mycompany.vault:kv_key    a function without arguments that returns 32 bytes or 64 hex digits

``7=file:/etc/kvstore/key7`` gives the key the id 7; without a number it has the id 1.  To rotate, put
the new key first and keep the old one behind it until nothing that it made is of use any more.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvstore.errors import ConfigError

logger = logging.getLogger("kvstore.keyring")

KEY_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 4096  # a key file has 32 to 65 bytes; /dev/zero must end as well
_MAX_ID: Final = (1 << 32) - 1
_SOURCE: Final = re.compile(r"(?:(?P<id>[0-9]{1,10})=)?(?P<form>file|env|call):(?P<where>.+)", re.ASCII)
_FUNCTION: Final = re.compile(r"[\w.]+:\w+")
_EXPECTED: Final = (
    'expected "file:PATH", "env:NAME" or "call:MODULE:FUNCTION", with "ID=" in front when there are several'
)


@dataclass(frozen=True, slots=True)
class SecretKey:
    """One key; its material is never shown.

    Attributes:
        key_id: Number that records carry, 0 to 2**32 - 1.
        material: 32 secret bytes.
    """

    key_id: int
    material: bytes = field(repr=False)

    def derived(self, purpose: bytes, context: bytes) -> bytes:
        """32 bytes for one purpose and context: keyed BLAKE2b, of which they reveal nothing.

        Args:
            purpose: At most 16 bytes.
            context: What the derived key is for, such as a namespace's digest.
        """
        return blake2b(context, key=self.material, person=purpose, digest_size=KEY_BYTES).digest()


def is_source(text: str) -> bool:
    """Whether a text has the form of a source; nothing is fetched."""
    return _SOURCE.fullmatch(text) is not None


class Keyring:
    """Keys of one purpose, the first of which writes; immutable.

    Args:
        keys: At least one, each with an id of its own.
    """

    def __init__(self, keys: Sequence[SecretKey]) -> None:
        self._keys = {key.key_id: key for key in keys}
        self.current = keys[0]
        """The key that is written with."""

    @classmethod
    def read(cls, sources: Sequence[str], option: str) -> Keyring:
        """Fetch every key.

        Args:
            sources: As the module's documentation says, at least one.
            option: Name of the setting, for messages; they never show key material.

        Raises:
            ConfigError: A source is malformed or not available, what it holds is no key, or an id
                comes twice.
        """
        if not sources:
            msg = f"{option} is empty; {_EXPECTED}"
            raise ConfigError(msg)
        keys = [_read(source, option) for source in sources]
        ids = [key.key_id for key in keys]
        for i, key_id in enumerate(ids):
            if key_id in ids[:i]:
                msg = f"{option}: id {key_id} comes twice; give each key its own, as in 2={sources[i]}"
                raise ConfigError(msg)
        return cls(keys)

    def find(self, key_id: int) -> SecretKey | None:
        """The key of that id, None when there is none."""
        return self._keys.get(key_id)

    def __iter__(self) -> Iterator[SecretKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Keyring of ids {', '.join(map(str, self._keys))}>"


def _read(source: str, option: str) -> SecretKey:
    match = _SOURCE.fullmatch(source)
    if match is None:  # not shown: somebody may have written the key itself
        msg = f"{option}: a source of {len(source)} characters is malformed; {_EXPECTED}"
        raise ConfigError(msg)
    key_id = int(match["id"] or 1)
    if key_id > _MAX_ID:
        msg = f"{option}: key id {key_id} is out of range; expected 0 to {_MAX_ID}"
        raise ConfigError(msg)
    try:
        found = _FORMS[match["form"]](match["where"])
        return SecretKey(key_id, _material(found))
    except ConfigError:
        raise
    except Exception as e:  # border: files, environment and the user's function
        msg = f"{option}: no key from {source!r}: {type(e).__name__}: {e}"
        raise ConfigError(msg) from e


def _material(found: object) -> bytes:
    """32 bytes of what a source gave.

    Raises:
        ValueError: It is no key; the message tells its length only.
    """
    if isinstance(found, bytes | bytearray) and len(found) == KEY_BYTES:
        return bytes(found)
    text = found.decode("ascii", "replace") if isinstance(found, bytes | bytearray) else found
    if not isinstance(text, str):
        msg = f"a {type(found).__name__} is no key; expected {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits"
        raise TypeError(msg)
    try:
        material = bytes.fromhex(text.strip())
    except ValueError:
        material = b""
    if len(material) != KEY_BYTES:
        msg = f"{len(text)} characters are no key; expected {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits"
        raise ValueError(msg) from None
    return material


def _from_file(where: str) -> bytes:
    path = os.path.expanduser(where)  # noqa: PTH111 - os.open takes it
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            logger.warning("key file %s can be read by others than its owner; chmod 600 it", path)
        return os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)


def _from_environment(where: str) -> str:
    if where not in os.environ:
        msg = f"the environment has no variable {where}"
        raise LookupError(msg)
    return os.environ[where]


def _from_function(where: str) -> object:
    if _FUNCTION.fullmatch(where) is None:
        raise ValueError("expected call:MODULE:FUNCTION")
    module, _, name = where.partition(":")
    function: Callable[[], object] = getattr(importlib.import_module(module), name)
    return function()


_FORMS: Final[dict[str, Callable[[str], object]]] = {
    "file": _from_file,
    "env": _from_environment,
    "call": _from_function,
}

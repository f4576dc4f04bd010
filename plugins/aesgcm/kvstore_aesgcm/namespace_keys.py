"""The keys that blocks are encrypted with: one per namespace, derived from a configured key."""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.keyring import KEY_BYTES, Keyring, SecretKey

_SALT: Final = b"kvstore/aes-gcm/1"


class NamespaceKeys:
    """Ciphers of one namespace at a time, made when they are first asked for.

    For one thread at a time.

    Args:
        ring: The configured keys.
    """

    def __init__(self, ring: Keyring) -> None:
        self._ring = ring
        self._namespace = b""
        self._ciphers: dict[int, AESGCM] = {}

    def use(self, namespace: bytes) -> None:
        """Say which namespace the calls that follow are about."""
        if namespace != self._namespace:
            self._namespace = namespace
            self._ciphers.clear()

    @property
    def current(self) -> tuple[int, AESGCM]:
        """Number and cipher of the key that encrypts."""
        key = self._ring.current
        return key.key_id, self._cipher(key)

    def find(self, key_id: int) -> AESGCM | None:
        """The cipher of a configured key; None when no key of that number is configured."""
        key = self._ring.find(key_id)
        return None if key is None else self._cipher(key)

    def _cipher(self, key: SecretKey) -> AESGCM:
        cipher = self._ciphers.get(key.key_id)
        if cipher is None:
            cipher = self._ciphers[key.key_id] = AESGCM(derived_key(key, self._namespace))
        return cipher


def derived_key(key: SecretKey, namespace: bytes) -> bytes:
    """The AES-256 key of one namespace: HKDF-SHA256 (RFC 5869) with a fixed salt, the namespace as info."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=_SALT, info=namespace).derive(key.material)

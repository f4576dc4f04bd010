"""The stored form of an encrypted segment.

::

     0  key id u32 · inner codec id u16 · reserved u16 (zero)
     8  nonce, 12 random bytes
    20  ciphertext, as long as what the inner codec made
    -16 tag

Little-endian.  The tag covers the ciphertext and, as additional data that is not stored: a label,
the first 8 bytes, the namespace, the block's digest, and the segment's first item and raw length.
So nothing that was encrypted for one place decrypts in another one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

from kvstore.errors import CorruptRecordError
from kvstore.segments import SegmentGeometry

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
_PREFIX: Final = struct.Struct("<IHH")
_PLACE: Final = struct.Struct("<QQ")
_LABEL: Final = b"kvstore/aes-gcm\x01"
_CIPHERTEXT: Final = _PREFIX.size + NONCE_BYTES
SEAL_BYTES: Final = _CIPHERTEXT + TAG_BYTES
"""36: what a segment grows by."""


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A stored segment taken apart; nothing of it was authenticated yet.

    Attributes:
        key_id: Number of the key.
        inner_id: Codec of the plaintext, 0 when it is the segment as it is.
        prefix: The 8 bytes that say so.
        nonce: The 12 bytes behind them.
        ciphertext: The rest, the tag last; borrows the stored bytes.
    """

    key_id: int
    inner_id: int
    prefix: bytes
    nonce: bytes
    ciphertext: memoryview

    @classmethod
    def parse(cls, stored: memoryview, raw_bytes: int) -> Self:
        """Take a stored segment apart; allocates nothing of its size.

        Raises:
            CorruptRecordError: ``codec``: its length fits no segment of ``raw_bytes``, or bytes that
                this version keeps zero are in use.
        """
        plain_bytes = len(stored) - SEAL_BYTES
        if not 0 < plain_bytes <= raw_bytes:
            detail = f"{len(stored)} encrypted bytes cannot hold a segment of {raw_bytes}"
            raise CorruptRecordError("codec", detail)
        key_id, inner_id, reserved = _PREFIX.unpack_from(stored)
        if reserved:
            raise CorruptRecordError("codec", f"reserved bytes of an encrypted segment are {reserved}, expected 0")
        if not inner_id and plain_bytes != raw_bytes:
            detail = f"{plain_bytes} bytes without an inner codec in a segment of {raw_bytes}"
            raise CorruptRecordError("codec", detail)
        prefix = bytes(stored[: _PREFIX.size])
        return cls(key_id, inner_id, prefix, bytes(stored[_PREFIX.size : _CIPHERTEXT]), stored[_CIPHERTEXT:])


def prefix_of(key_id: int, inner_id: int) -> bytes:
    """The first 8 bytes of a segment."""
    return _PREFIX.pack(key_id, inner_id, 0)


def bound_data(prefix: bytes, block: bytes, geometry: SegmentGeometry) -> bytes:
    """What the tag covers besides the ciphertext.

    Args:
        prefix: The segment's first 8 bytes.
        block: Namespace and digest of the block, 48 bytes.
        geometry: Where the segment lies in the block.
    """
    return b"".join((_LABEL, prefix, block, _PLACE.pack(geometry.first_item, geometry.raw_bytes)))

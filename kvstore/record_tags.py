"""Authentication tags of keyed records: what nobody can make who does not have the key.

A segment's tag is a keyed BLAKE2b-128 of its stored bytes.  The header's covers the header, with tag
and checksum taken as zeros, and the segment table, hence the segments' tags as well.  The two kinds
have different personalizations, so that a tag of one is never good as the other.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Final

from kvstore.errors import CorruptRecordError
from kvstore.keyring import Keyring

TAG_BYTES: Final = 16
_PURPOSE: Final = b"kvstore-record"  # of the keys that are derived from those of the ring
_HEAD: Final = b"kvstore-head"
_SEGMENT: Final = b"kvstore-segment"
_TAG_AT: Final = 152
_TAG_END: Final = _TAG_AT + TAG_BYTES
_CHECKSUM_AT: Final = 184
_TABLE_AT: Final = 192
_ENTRY_BYTES: Final = 32
_TAG_IN_ENTRY: Final = 16


class RecordTags:
    """Makes and checks the tags of the records of one namespace; immutable, thread-safe.

    Args:
        keys: The first one writes, each of them reads.
        namespace: 16-byte digest of the namespace; another one has other keys.
    """

    def __init__(self, keys: Keyring, namespace: bytes) -> None:
        self._keys = tuple(key.derived(_PURPOSE, namespace) for key in keys)
        self.writing = self._keys[0]
        """Key for new records."""

    def authenticate(self, head: memoryview, *, keyed: bool) -> bytes:
        """Find the key that made a head whose structure was checked.

        Args:
            head: Header and segment table, no more.
            keyed: Whether the record has tags at all.

        Returns:
            The key, for :func:`check_segment`.

        Raises:
            CorruptRecordError: ``tag``, when no key of the ring made it.
        """
        if not keyed:
            raise CorruptRecordError("tag", "the record is not keyed, and keys are configured")
        found = bytes(head[_TAG_AT:_TAG_END])
        for key in self._keys:
            if hmac.compare_digest(head_tag(key, head), found):
                return key
        raise CorruptRecordError("tag", f"none of {len(self._keys)} keys made this record")


def head_tag(key: bytes, head: bytes | bytearray | memoryview) -> bytes:
    """Return the tag of a header and its segment table, whatever stands where tag and checksum belong."""
    tag = blake2b(key=key, person=_HEAD, digest_size=TAG_BYTES)
    with memoryview(head) as view:
        for part in (view[:_TAG_AT], bytes(TAG_BYTES), view[_TAG_END:_CHECKSUM_AT], bytes(8), view[_TABLE_AT:]):
            tag.update(part)
    return tag.digest()


def put_head_tag(key: bytes, head: bytearray) -> None:
    """Enter the tag into a header with its segment table; before the checksum, which covers it."""
    head[_TAG_AT:_TAG_END] = head_tag(key, head)


def segment_tag(key: bytes, stored: bytes | memoryview) -> bytes:
    """Return the tag of one stored segment."""
    return blake2b(stored, key=key, person=_SEGMENT, digest_size=TAG_BYTES).digest()


def segment_tags(head: memoryview) -> list[bytes]:
    """Return the tags in the segment table of a keyed head."""
    return [bytes(head[at : at + TAG_BYTES]) for at in range(_TABLE_AT + _TAG_IN_ENTRY, len(head), _ENTRY_BYTES)]


def check_segment(key: bytes, tag: bytes, stored: memoryview, index: int) -> None:
    """Check one stored segment against its tag.

    Raises:
        CorruptRecordError: ``tag``.
    """
    if not hmac.compare_digest(segment_tag(key, stored), tag):
        raise CorruptRecordError("tag", f"segment {index} does not match its tag")

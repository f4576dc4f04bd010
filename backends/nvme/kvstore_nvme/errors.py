"""Errors of the system and of the index turned into kvstore's words, in one place."""

from __future__ import annotations

import errno
from typing import Final

import lmdb
from kvstore_lmdb.errors import errno_of, is_damage, is_read_only, needs_reopen

from kvstore.errors import BackendError, BackendFullError, BackendPermissionError, BackendUnavailableError
from kvstore.types import PutStatus, ReadStatus

__all__ = [
    "Failure",
    "errno_of",
    "is_damage",
    "is_full",
    "is_media_error",
    "is_read_only",
    "needs_reopen",
    "put_status",
    "read_status",
    "translate",
]

Failure: Final = (OSError, lmdb.Error)
"""What the system and liblmdb raise."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP})


def is_full(error: Exception) -> bool:
    """Whether the medium, or the index with its own bound, lacks room."""
    if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError)):
        return True
    number = errno_of(error)
    # liblmdb reports a short write on a full disk as EIO
    return number in _FULL or (isinstance(error, lmdb.Error) and number == errno.EIO)


def is_media_error(error: Exception) -> bool:
    """Whether the device could not read these very bytes."""
    return isinstance(error, OSError) and error.errno == errno.EIO


def put_status(error: Exception) -> PutStatus:
    """Say what a failed write means for its records."""
    if is_full(error):
        return PutStatus.FULL
    if is_read_only(error):
        return PutStatus.READ_ONLY
    if isinstance(error, lmdb.ReadonlyError) or errno_of(error) in _DENIED:
        return PutStatus.DENIED
    return PutStatus.UNAVAILABLE


def read_status(error: Exception) -> ReadStatus:
    """Say what a failed read means for its records."""
    return ReadStatus.DENIED if errno_of(error) in _DENIED else ReadStatus.UNAVAILABLE


def translate(error: Exception, doing: str) -> BackendError:
    """Make the exception for a failure that has no status to be told by."""
    text = f"{doing}: {error}"
    if is_full(error):
        return BackendFullError(f"{text}; free disk space or lower 'capacity'")
    if is_read_only(error) or errno_of(error) in _DENIED:
        return BackendPermissionError(f"{text}; check owner, mode, links and mount options")
    return BackendUnavailableError(text)

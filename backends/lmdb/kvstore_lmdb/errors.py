"""Every error of liblmdb and the system turned into kvstore's words, in one place."""

from __future__ import annotations

import errno
import os
from typing import Final

import lmdb

from kvstore.errors import BackendError, BackendFullError, BackendPermissionError, BackendUnavailableError
from kvstore.types import PutStatus, ReadStatus

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_KNOWN: Final = (*sorted(_FULL), errno.EROFS, *sorted(_DENIED), errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
)


def errno_of(error: Exception) -> int:
    """Return the system error number behind an exception; 0 when there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    code = getattr(error, "code", 0)
    if isinstance(code, int) and code > 0:
        return code
    text = str(error)
    return next((number for number in _KNOWN if os.strerror(number) in text), 0)


def is_full(error: Exception) -> bool:
    """Whether the medium says that it lacks room."""
    return isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError)) or errno_of(error) in _FULL


def is_io_error(error: Exception) -> bool:
    """Whether a transfer failed; liblmdb says so as well when a full disk cut a write short."""
    return errno_of(error) == errno.EIO


def is_read_only(error: Exception) -> bool:
    """Whether the file system is mounted read-only."""
    return errno_of(error) == errno.EROFS


def is_damage(error: Exception) -> bool:
    """Whether liblmdb met damage; the file must be checked before it is used again."""
    return isinstance(error, _DAMAGE)


def needs_reopen(error: Exception) -> bool:
    """Whether the environment is of no use to this process any more."""
    return is_damage(error) or isinstance(error, (lmdb.MapResizedError, lmdb.PanicError, lmdb.BadDbiError))


def put_status(error: Exception) -> PutStatus:
    """Say what a failed write transaction means for its records."""
    if is_full(error):
        return PutStatus.FULL
    if is_read_only(error):
        return PutStatus.READ_ONLY
    if isinstance(error, lmdb.ReadonlyError) or errno_of(error) in _DENIED:
        return PutStatus.DENIED
    return PutStatus.UNAVAILABLE


def read_status(error: Exception) -> ReadStatus:
    """Say what a failed read transaction means for its names."""
    return ReadStatus.DENIED if errno_of(error) in _DENIED else ReadStatus.UNAVAILABLE


def translate(error: Exception, doing: str) -> BackendError:
    """Make the exception for a failure that has no status to be told by."""
    text = f"{doing}: {error}"
    number = errno_of(error)
    if number in _FULL or isinstance(error, lmdb.MapFullError):
        return BackendFullError(f"{text}; free disk space")
    if number == errno.EROFS or number in _DENIED:
        return BackendPermissionError(f"{text}; check owner, mode and mount options")
    if number == errno.ENOMEM:
        return BackendUnavailableError(f"{text}; the address space is limited (ulimit -v): lower option 'map_size'")
    if isinstance(error, lmdb.ReadersFullError):
        return BackendUnavailableError(f"{text}; raise option 'max_readers'")
    return BackendUnavailableError(text)

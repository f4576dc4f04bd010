"""What the system says about files of a tree, in kvstore's words."""

from __future__ import annotations

import errno
from typing import Final

from kvstore.errors import (
    BackendError,
    BackendFullError,
    BackendPermissionError,
    BackendUnavailableError,
    NotSupportedError,
)

GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP})
"""The file is not there, was removed by another machine, or is a link that is not followed."""

NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""The file system has no hard links, as some FUSE and SMB mounts."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})


def translate(error: OSError, doing: str) -> BackendError:
    """Make the exception for a failed system call."""
    text = f"{doing}: {error.strerror or error}"
    if error.errno in _FULL:
        return BackendFullError(f"{text}; free disk space or lower 'capacity'")
    if error.errno == errno.EROFS:
        return NotSupportedError(f"{text}; the file system is mounted read-only")
    if error.errno in _DENIED:
        return BackendPermissionError(f"{text}; check owner and mode of the directory")
    return BackendUnavailableError(text)

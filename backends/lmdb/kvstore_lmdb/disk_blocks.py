"""Disk blocks for a file before it is mapped, so that a lack of room is an error and no signal."""

from __future__ import annotations

import errno
import os
from typing import Final

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})  # ZFS, some NFS; glibc hides it, musl does not
_ZEROS: Final = bytes(1 << 20)


def extend(fd: int, nbytes: int) -> None:
    """Make a file at least so long, with blocks and not a hole; what it holds stays as it is.

    Raises:
        OSError: There is no room.
    """
    start = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, max(nbytes, start))
    except OSError as e:
        if e.errno not in _UNSUPPORTED:
            raise
        while start < nbytes:
            start += os.pwrite(fd, _ZEROS[: nbytes - start], start)

"""Directories and files for their owner alone, whatever the umask says, and never through a link."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def make_private_directory(path: Path) -> bool:
    """Make a directory with mode 0700, and those above it that are missing.

    Args:
        path: The directory; one that exists, also by a link, is left as it is.

    Returns:
        Whether it was made.

    Raises:
        OSError: It cannot be made.
    """
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if not make_private_directory(path.parent):
            raise  # what is above it exists and leads nowhere
        path.mkdir(mode=DIRECTORY_MODE)
    path.chmod(DIRECTORY_MODE)  # a strict umask took rights that the owner needs
    return True


def write_private_file(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a whole file with mode 0600; a link in its place is replaced, not followed.

    Args:
        path: The file, in a directory that exists.
        content: Its bytes.
        replace: Whether to put it in place of an existing one, which is whole until then.

    Raises:
        FileExistsError: There is one, or a link, and ``replace`` is false.
        OSError: It cannot be written.
    """
    if not replace:
        with os.fdopen(os.open(path, _NEW, FILE_MODE), "wb") as out:
            out.write(content)
        return
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)  # O_EXCL, mode 0600
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_small_file(path: Path, most_bytes: int) -> bytes | None:
    """What a regular file holds; None when it is a link, longer than ``most_bytes``, or cannot be read.

    Nothing that somebody put in its place, such as a pipe, blocks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        content = b""
        while len(content) <= most_bytes and (piece := os.read(fd, most_bytes + 1 - len(content))):
            content += piece
    except OSError:
        return None
    finally:
        os.close(fd)
    return content if len(content) <= most_bytes else None


def open_private_file(path: Path) -> int:
    """Open a file for reading and writing, made with mode 0600 if need be; the caller closes it.

    Raises:
        OSError: It cannot be opened, or is a link (ELOOP).
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

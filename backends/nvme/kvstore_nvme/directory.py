"""Where the store lies: checking the option, creating the directory, judging its file system."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
from pathlib import Path
from typing import Final

from kvstore_lmdb.directory import file_system, is_network

from kvstore.errors import BackendPermissionError, BackendUnavailableError, ConfigError
from kvstore_nvme.geometry import ANCHOR_NAME
from kvstore_nvme.slot import PAGE_BYTES

_MOUNTS: Final = Path("/proc/self/mounts")


def resolve(path: str) -> Path:
    """Return the absolute directory that the option ``path`` means.

    Raises:
        ConfigError: It is empty or contains a NUL character.
    """
    if not path or "\0" in path:
        raise ConfigError(f"backend 'nvme', option 'path': {path!r} is not a directory name")
    return Path(path).expanduser().absolute()


def file_system_of(path: Path) -> str:
    """Name the type of the file system under ``path``; empty when unknown."""
    try:
        return file_system(path, _MOUNTS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def check_file_system(path: Path, *, allow_network: bool, logger: logging.Logger) -> str:
    """Refuse a network file system unless allowed; return the type found.

    Raises:
        BackendUnavailableError: It is one and ``allow_network`` is false.
    """
    kind = file_system_of(path)
    if is_network(kind):
        if not allow_network:
            raise BackendUnavailableError(
                f"backend 'nvme', option 'path': {path} lies on the network file system {kind!r}, where segment files "
                "with a shared index may tear; use layout = 'tree', a local disk, or set allow_network_fs = true"
            )
        logger.warning("%s lies on the network file system %r; locks and the index may not work there", path, kind)
    return kind


def private_folder(path: Path, *, create: bool) -> Path:
    """Return a folder inside the store, made with mode 0700 if need be.

    Raises:
        BackendPermissionError: It is a link or a file.
        OSError: It cannot be made.
    """
    if create:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            path.chmod(0o700)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise BackendPermissionError(f"{path} is not a directory; links are not followed here: remove it")
    return path


def direct_works(directory: Path) -> bool:
    """Whether the file system reads a page of the anchor file past the page cache."""
    try:
        fd = os.open(directory / ANCHOR_NAME, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.preadv(fd, [page], 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)

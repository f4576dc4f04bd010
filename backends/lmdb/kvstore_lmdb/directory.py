"""Where the database lies: creating the directory safely and judging the file system under it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

from kvstore.errors import BackendPermissionError, BackendUnavailableError, ConfigError
from kvstore.private_files import make_private_directory, read_small_file

_MOUNTS: Final = Path("/proc/self/mounts")
_NETWORK: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "beegfs", "ceph", "coda", "davfs", "fuse", "gfs2",
        "glusterfs", "gpfs", "ipfs", "juicefs", "lustre", "moosefs", "ncpfs", "ocfs2", "orangefs", "panfs", "pvfs2",
        "quobyte", "wekafs",
    }
)  # fmt: skip
_MAX_DESCRIPTIONS: Final = 256
_MAX_DESCRIPTION_BYTES: Final = 64 << 10  # one has about 1 KiB; what is larger is something else
_FOREIGN_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def resolve(path: str) -> Path:
    """Return the absolute directory that the option ``path`` means.

    Raises:
        ConfigError: It is empty or contains a NUL character.
    """
    if not path or "\0" in path:
        raise ConfigError(f"backend 'lmdb', option 'path': {path!r} is not a directory name")
    return Path(path).expanduser().absolute()


def file_system(path: Path, mounts: str) -> str:
    """Name the type of the file system that holds ``path``.

    Args:
        path: Absolute path; its nearest existing parent counts.
        mounts: Text of ``/proc/self/mounts``.

    Returns:
        The type, such as ``"ext4"``; empty when unknown.
    """
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system type shares its files with other machines or lives in a daemon."""
    return kind in _NETWORK or kind.startswith("fuse.")


def check_file_system(path: Path, *, allow_network: bool, logger: logging.Logger) -> str:
    """Refuse a network file system unless allowed; return the type found.

    Raises:
        BackendUnavailableError: It is one and ``allow_network`` is false.
    """
    try:
        kind = file_system(path, _MOUNTS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    if not is_network(kind):
        return kind
    if not allow_network:
        raise BackendUnavailableError(
            f"backend 'lmdb', option 'path': {path} lies on the network file system {kind!r}, where a shared memory "
            "map may tear records or kill the process; use a local disk or set allow_network_fs = true"
        )
    logger.warning("%s lies on the network file system %r; records may tear and the process may die", path, kind)
    return kind


def prepare(path: Path, logger: logging.Logger, *, backend: str = "lmdb") -> None:
    """Create the directory, and missing ones above it, with mode 0700, or look at who else may write to it.

    Args:
        path: The directory.
        logger: Told when others may write there.
        backend: Whose directory it is, for messages.

    Raises:
        BackendUnavailableError: Something else is there.
        OSError: It cannot be created.
    """
    if make_private_directory(path):
        for above in path.parents:
            with contextlib.suppress(OSError):  # not ours to sync; the directory is there all the same
                sync_directory(above)
        return
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise BackendUnavailableError(
            f"backend {backend!r}, option 'path': {path} is not a directory; name one that is or does not exist yet"
        )
    if found.st_mode & _FOREIGN_WRITE or found.st_uid != os.geteuid():
        logger.warning(
            "%s belongs to uid %d and has mode %04o: others can replace stored records; chmod 0700 it",
            path,
            found.st_uid,
            stat.S_IMODE(found.st_mode),
        )


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut: syncing a file is about its bytes alone.

    Raises:
        OSError: The medium failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def regular_file(path: Path) -> os.stat_result | None:
    """Stat a file of the store without following links; None when absent.

    Raises:
        BackendPermissionError: It is a symbolic link.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise BackendPermissionError(
            f"{path} is a symbolic link; kvstore does not follow links inside its directory: remove it"
        )
    return found


def describe_namespace(path: Path, namespace: bytes, text: str) -> None:
    """Keep the readable description of a namespace at ``namespaces/<hex>.json``, replaced atomically.

    Raises:
        OSError: It cannot be written; the store works without it.
    """
    folder = path / "namespaces"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink():
        raise OSError(f"{folder} is a symbolic link")
    target = folder / f"{namespace.hex()}.json"
    if read_small_file(target, _MAX_DESCRIPTION_BYTES) == text.encode():
        return
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=folder)  # mode 0600, O_EXCL
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_descriptions(path: Path) -> list[bytes]:
    """Return what :func:`describe_namespace` wrote for each namespace, in no order; links are not followed."""
    folder = path / "namespaces"
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = []
    for name in sorted(os.listdir(folder))[:_MAX_DESCRIPTIONS]:  # noqa: PTH208 - names alone
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as file:
            text = file.read(_MAX_DESCRIPTION_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        if text and len(text) <= _MAX_DESCRIPTION_BYTES:
            found.append(text)
    return found

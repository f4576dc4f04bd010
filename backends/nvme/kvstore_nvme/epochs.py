"""The epochs beside the index, so that a rebuilt index finds the records of the present ones.

One line of 32 bytes for each namespace: namespace, epoch and a checksum.  A line is replaced where
it stands; one that a power cut tore is as good as none, which costs a cold start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstore_lmdb.directory import sync_directory
from xxhash import xxh3_64_digest

EPOCHS_NAME: Final = "kvstore.epochs"
_LINE_BYTES: Final = 32
_NAMESPACE_BYTES: Final = 16
_PAIR_BYTES: Final = 24
_MAX_BYTES: Final = 64 << 10  # 2,048 namespaces; later ones are kept in the index alone


def load_epochs(directory: Path) -> dict[bytes, bytes]:
    """Return the epoch of each namespace; what is unreadable is left out."""
    try:
        fd = os.open(directory / EPOCHS_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        return {line[:_NAMESPACE_BYTES]: line[_NAMESPACE_BYTES:_PAIR_BYTES] for line in _lines(fd) if _sound(line)}
    finally:
        os.close(fd)


def save_epoch(directory: Path, namespace: bytes, epoch: bytes) -> None:
    """Replace a namespace's line and bring it to the medium; callers serialise.

    Raises:
        OSError: It cannot be written.
    """
    if len(namespace) != _NAMESPACE_BYTES:
        return
    fd = os.open(directory / EPOCHS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask says
        lines = _lines(fd)
        mine = (i for i, line in enumerate(lines) if line[:_NAMESPACE_BYTES] == namespace or not _sound(line))
        at = next(mine, len(lines)) * _LINE_BYTES
        if at < _MAX_BYTES:
            pair = namespace + epoch
            os.pwrite(fd, pair + xxh3_64_digest(pair), at)
            os.fsync(fd)
            if not lines:
                sync_directory(directory)  # the file is new
    finally:
        os.close(fd)


def _lines(fd: int) -> list[bytes]:
    data = os.pread(fd, _MAX_BYTES, 0)
    return [data[at : at + _LINE_BYTES] for at in range(0, len(data), _LINE_BYTES)]


def _sound(line: bytes) -> bool:
    return len(line) == _LINE_BYTES and line[_PAIR_BYTES:] == xxh3_64_digest(line[:_PAIR_BYTES])

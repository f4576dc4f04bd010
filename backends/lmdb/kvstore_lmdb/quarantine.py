"""Set damaged files aside instead of deleting them, a bounded number of times."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

GENERATIONS: Final = 2


def set_aside(path: Path) -> Path:
    """Rename ``path`` to ``<name>.corrupt-<time>-<pid>`` and keep the newest two such names.

    Args:
        path: File, directory or symbolic link; links are renamed, never followed.

    Returns:
        The new path.

    Raises:
        OSError: The directory does not allow it.
    """
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    target = path.with_name(f"{path.name}.corrupt-{stamp}-{os.getpid()}")
    suffix = 1
    while os.path.lexists(target):
        suffix += 1
        target = path.with_name(f"{path.name}.corrupt-{stamp}-{os.getpid()}.{suffix}")
    path.rename(target)
    os.utime(target, follow_symlinks=False)  # its age as a generation, not as data
    for old in generations(path)[:-GENERATIONS]:
        _remove(old)
    return target


def generations(path: Path) -> list[Path]:
    """List what was set aside for ``path``, oldest first."""
    found = path.parent.glob(f"{path.name}.corrupt-*")
    return sorted(found, key=lambda p: (p.lstat().st_mtime_ns, p.name))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

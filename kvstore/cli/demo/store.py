"""The demo's store folder: emptied at the start, and never a folder of somebody else."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvstore.cli.demo.errors import DemoSetupError
from kvstore.private_files import make_private_directory, open_private_file

_MARKER: Final = ".kvstore-demo"
_MARKER_TEXT: Final = "This folder belongs to `kvstore demo`, which empties it at every start.\n"
CODEC: Final = "planes"


@contextmanager
def empty_store(folder: Path) -> Iterator[Path]:
    """Make ``folder`` an empty store of the demo, held by this process until the end of the block.

    Raises:
        DemoSetupError: The folder has contents that the demo did not make, or another demo uses it.
    """
    folder = folder.absolute()
    marker = folder / _MARKER
    ours = marker.is_file() and not marker.is_symlink()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        msg = f"{folder} was not made by `kvstore demo` and is not empty; nothing was deleted, give another --store"
        raise DemoSetupError(msg)
    make_private_directory(folder)
    with os.fdopen(open_private_file(marker), "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            msg = f"another `kvstore demo` is using {folder}; wait for it or give another --store"
            raise DemoSetupError(msg) from e
        if marker.stat().st_size == 0:
            lock.write(_MARKER_TEXT)
            lock.flush()
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
        yield folder


def tier_folder(folder: Path) -> Path:
    """Where the demo's LMDB tier lies; what `kvstore stat` and `kvstore verify` take."""
    return folder / "lmdb"


def store_config(folder: Path) -> dict[str, Any]:
    """A cache in front of an embedded LMDB file, as a user would write it in TOML."""
    return {
        "l1": {"capacity": "1GiB"},
        "l2": [{"backend": "lmdb", "path": str(tier_folder(folder)), "capacity": "4GiB", "codec": CODEC}],
    }

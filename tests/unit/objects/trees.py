"""What the tests of the tree layout share: opened stores, what lies on the disk, real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore_nvme.options import NvmeOptions
from kvstore_nvme.tree import TreeBackend

from kvstore.backend import BackendContext

Opener = Callable[..., TreeBackend]
BLOCK_BYTES = 4000


@contextmanager
def openings(default: Path) -> Iterator[Opener]:
    """A function that opens trees, which are closed at the end."""
    opened: list[TreeBackend] = []

    def open_(path: Path | None = None, *, pack: int = 16, **context: Any) -> TreeBackend:
        backend = TreeBackend()
        options = NvmeOptions(path=str(path or default), layout="tree", pack=pack)
        fields = {"tier": "tree", "capacity_bytes": 64 << 20, "block_bytes": BLOCK_BYTES, **context}
        backend.open(BackendContext(options=options, **fields))
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


def files_in(root: Path) -> list[Path]:
    """Every file of a tree, temporaries included, notes not."""
    notes = {"format", "epochs", "namespaces", "drops"}
    return sorted(p for p in root.rglob("*") if p.is_file() and p.relative_to(root).parts[0] not in notes)


def taken_bytes(root: Path) -> int:
    """What everything below a directory takes from the disk, directories included."""
    total = root.lstat().st_blocks * 512
    for parent, folders, files in os.walk(root):  # passes over what is removed meanwhile
        for name in folders + files:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_blocks * 512
    return total


PRELUDE = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.objects.mem import *
from tests.unit.objects.trees import *
STORE = Path(sys.argv[1])
def start(**context):
    backend = TreeBackend()
    options = NvmeOptions(path=str(STORE), layout="tree")
    fields = {{"capacity_bytes": 64 << 20, "block_bytes": BLOCK_BYTES, **context}}
    backend.open(BackendContext(tier="tree", options=options, **fields))
    return backend
"""


def script(code: str, store: Path) -> list[str]:
    """Command line of a Python process that runs ``code`` on a store."""
    prelude = PRELUDE.format(root=str(Path(__file__).parents[3]))
    return [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(code), str(store)]


def run(code: str, store: Path, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own and return what it did."""
    return subprocess.run(script(code, store), capture_output=True, text=True, timeout=timeout_s, check=False)

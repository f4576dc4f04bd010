"""Names of files that are being written, which tell whether their writer still lives."""

from __future__ import annotations

import functools
import os
import re
import secrets
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final

_PREFIX: Final = ".tmp-"
_NAME: Final = re.compile(r"\.tmp-([0-9a-f]{16})-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}\Z")
_FOREIGN_S: Final = 3600.0
"""Age at which another machine's temporary is given up: writes end within seconds of their deadline."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def _machine() -> str:
    """Something that only processes have which see the same process ids, until the next boot."""
    boot = _BOOT.read_text() if _BOOT.exists() else os.uname().nodename
    namespace = Path("/proc/self/ns/pid")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return blake2b(f"{boot}/{inode}".encode(), digest_size=8).hexdigest()


def _start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, which tells it from a later one of that id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def _owner(pid: int) -> str:
    return f"{_machine()}-{pid}-{_start_of(pid) or 0}"


def new_name() -> str:
    """A name nobody has used or will use."""
    return f"{_PREFIX}{_owner(os.getpid())}-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Whether a file name is one that :func:`new_name` makes."""
    return name.startswith(_PREFIX) and _NAME.match(name) is not None


def is_stale(name: str, modified: float) -> bool:
    """Whether nobody is writing that temporary any more."""
    match = _NAME.match(name)
    if match is None:
        return False
    machine, pid, start = match[1], int(match[2]), int(match[3])
    if machine == _machine():
        return _start_of(pid) != start and not (start == 0 and _alive(pid))
    return time.time() - modified > _FOREIGN_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

"""How much memory this process may have."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One upper bound on memory.

    Attributes:
        name: Where it comes from, for messages.
        nbytes: The bound in bytes.
    """

    name: str
    nbytes: int


def memory_limits(
    groups_file: Path = Path("/proc/self/cgroup"), groups_root: Path = Path("/sys/fs/cgroup")
) -> list[MemoryLimit]:
    """Return the physical memory, RLIMIT_AS and cgroup limits that are set.

    Args:
        groups_file: Lists the cgroups of this process, format of proc_pid_cgroup(5).
        groups_root: Where cgroup file systems (v1 or v2) are mounted.
    """
    limits = [MemoryLimit("physical memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(MemoryLimit("RLIMIT_AS (ulimit -v)", address_space))
    limits.extend(_cgroup_limits(groups_file, groups_root))
    return limits


def check_capacity(capacity_bytes: int, limits: Sequence[MemoryLimit]) -> None:
    """Refuse a capacity that this process can never use.

    Raises:
        ConfigError: ``capacity_bytes`` is above the tightest limit; names option and both numbers.
    """
    tightest = min(limits, key=lambda limit: limit.nbytes)
    if capacity_bytes > tightest.nbytes:
        msg = (
            f"l1.capacity is {capacity_bytes} bytes, more than the host RAM this process may use: "
            f"{tightest.name} is {tightest.nbytes} bytes; lower l1.capacity or raise that limit"
        )
        raise ConfigError(msg)


def _cgroup_limits(groups_file: Path, groups_root: Path) -> Iterator[MemoryLimit]:
    for line in (_read(groups_file) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, name = groups_root, "memory.max"  # v2
        elif "memory" in controllers.split(","):
            base, name = groups_root / "memory", "memory.limit_in_bytes"  # v1
        else:
            continue
        group = PurePosixPath(path)
        if ".." in group.parts:  # outside of this container's view: only the root can be read
            group = PurePosixPath("/")
        for level in (group, *group.parents):  # an ancestor's limit holds too
            text = (_read(base / str(level).lstrip("/") / name) or "").strip()
            if text.isdecimal():  # "max" means no limit
                yield MemoryLimit(f"cgroup limit {name}", int(text))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None

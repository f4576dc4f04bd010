"""What ``kvstore doctor`` looks at besides the tiers: memory for L1 and limits of the process."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.backend import Finding
from kvstore.cli.output import size

if TYPE_CHECKING:
    from kvstore.config import Config

_MEMORY: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_TIGHT: Final = 0.8  # of the available memory: the engine itself needs some
_MIN_FILES: Final = 1024  # sockets and files of a few tiers beside an engine's own


def host_findings(config: Config) -> list[Finding]:
    """Judge the machine for a config."""
    findings = []
    if config.l1.enabled:
        available = available_bytes(_MEMORY, _CGROUP)
        if available:
            findings.append(_l1(config.l1.capacity, available))
    findings.append(_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    return findings


def available_bytes(memory: Path, cgroup: Path) -> int:
    """Memory that a new process can get: the machine's, cut by the control group's; 0 when unknown."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in memory.read_text().splitlines() if ":" in line)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" without a limit
        found.append(limit - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found, default=0))


def _l1(capacity_bytes: int, available: int) -> Finding:
    what = f"l1.capacity is {size(capacity_bytes)}, and {size(available)} of memory are available"
    if capacity_bytes > available:
        return Finding("problem", what, "lower l1.capacity: the kernel would kill the process before L1 is full")
    if capacity_bytes > _TIGHT * available:
        return Finding("warning", what, "leave memory for the engine and the page cache: lower l1.capacity")
    return Finding("ok", what)


def _files(limit: int) -> Finding:
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    what = f"the process may open {shown} files, on {os.cpu_count()} cores"
    if limit != resource.RLIM_INFINITY and limit < _MIN_FILES:
        return Finding("warning", what, f"raise the limit to at least {_MIN_FILES:,}: ulimit -n {_MIN_FILES}")
    return Finding("ok", what)

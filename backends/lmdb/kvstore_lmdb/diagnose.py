"""What ``kvstore doctor`` says about the place of an LMDB store, without opening the tier."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import lmdb

from kvstore.backend import BackendContext, Finding
from kvstore.errors import BackendError, ConfigError
from kvstore_lmdb.directory import file_system, is_network, resolve
from kvstore_lmdb.environment import TREES, join, leave
from kvstore_lmdb.errors import translate
from kvstore_lmdb.guard import DATA_NAME, GuardSettings
from kvstore_lmdb.options import DEFAULT_CAPACITY_BYTES, LmdbOptions, map_bytes

_MOUNTS: Final = Path("/proc/self/mounts")
_FILE_RATIO: Final = 1.25  # a data file stays below this times the capacity
_LITTLE_BYTES: Final = 64 << 20  # 64 MiB: less room than that and hardly a batch of blocks fits
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_LAYERED: Final = frozenset({"overlay", "aufs"})
_CROWDED: Final = 0.8  # of the reader slots


def diagnose(context: BackendContext) -> list[Finding]:
    """Look at directory, file system, room and limits; creates nothing and raises nothing."""
    options = context.options
    if not isinstance(options, LmdbOptions):
        return [Finding("problem", f"options must be LmdbOptions, not {options!r}")]
    try:
        directory = resolve(options.path)
        capacity_bytes = context.capacity_bytes or DEFAULT_CAPACITY_BYTES
        findings = [*_file_system(directory, options), *_access(directory), *_room(directory, capacity_bytes)]
        findings += _address_space(map_bytes(options, capacity_bytes))
        if (directory / DATA_NAME).is_file():
            findings += _store(directory, options, context)
    except (ConfigError, OSError) as e:
        return [Finding("problem", str(e), "name a directory on a local disk in the option 'path'")]
    return findings


def _file_system(directory: Path, options: LmdbOptions) -> Iterator[Finding]:
    kind = file_system(directory, _MOUNTS.read_text(encoding="utf-8", errors="replace")) or "unknown"
    what = f"{directory} lies on a file system of type {kind}"
    if is_network(kind):
        level: Literal["warning", "problem"] = "warning" if options.allow_network_fs else "problem"
        advice = 'use a local disk; for a shared mount take backend = "nvme" with layout = "tree"'
        yield Finding(level, f"{what}, where a shared memory map may tear records or kill the process", advice)
    elif kind in _VOLATILE:
        yield Finding("warning", f"{what}: it takes memory and is empty after a restart", "name a directory on a disk")
    elif kind in _LAYERED:
        advice = "mount a volume there, or the store is lost with the container"
        yield Finding("warning", f"{what}: the writable layer of a container", advice)
    else:
        yield Finding("ok", what)


def _access(directory: Path) -> Iterator[Finding]:
    if directory.exists() and not directory.is_dir():
        advice = "name a directory, or a path where nothing is yet"
        yield Finding("problem", f"{directory} is not a directory", advice)
        return
    place = _existing(directory)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        advice = "remount it read-write; until then what is there is served and nothing is stored"
        yield Finding("warning", f"{place} lies on a read-only mount", advice)
    elif not os.access(place, os.W_OK | os.X_OK):
        owner = place.stat()
        what = (
            f"uid {os.geteuid()} may not write to {place} (uid {owner.st_uid}, mode {stat.S_IMODE(owner.st_mode):04o})"
        )
        yield Finding("problem", what, f"chown it to uid {os.geteuid()}, or name another directory")
    elif place != directory:
        yield Finding("ok", f"{directory} is not there yet and will be created with mode 0700")
    else:
        yield _privacy(directory)


def _privacy(directory: Path) -> Finding:
    found = directory.stat()
    what = f"{directory} belongs to uid {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid != os.geteuid():
        return Finding("warning", f"{what}: others can replace stored records", f"chmod 0700 {directory}")
    return Finding("ok", what)


def _room(directory: Path, capacity_bytes: int) -> Iterator[Finding]:
    place = _existing(directory)
    free = shutil.disk_usage(place).free
    data = directory / DATA_NAME
    taken = data.stat().st_blocks * 512 if data.is_file() else 0
    wanted = int(_FILE_RATIO * capacity_bytes) - taken
    what = f"{_mib(free)} are free; the data file may still grow by {_mib(max(0, wanted))}"
    if free < min(wanted, _LITTLE_BYTES):
        yield Finding("problem", what, "free disk space: new blocks are refused or push out old ones")
    elif free < wanted:
        advice = f"lower the capacity to {_mib(int((free + taken) / _FILE_RATIO))} or less, or make room"
        yield Finding("warning", f"{what}, so the disk is full before the store is", advice)
    else:
        yield Finding("ok", what)


def _address_space(wanted: int) -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    left = limit - int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    what = (
        f"address space is limited to {_mib(limit)}, {_mib(max(0, left))} are left, the memory map takes {_mib(wanted)}"
    )
    if wanted > left:
        yield Finding("problem", what, "lift the limit (ulimit -v unlimited), or set map_size to less")
    else:
        yield Finding("ok", what)


def _store(directory: Path, options: LmdbOptions, context: BackendContext) -> Iterator[Finding]:
    """Open what is there read-only and look at the table of readers."""
    settings = GuardSettings(map_bytes(options, 1), options.max_readers, len(TREES), context.durability, read_only=True)
    try:
        environment = join(directory, settings, context.logger)
    except (BackendError, ConfigError) as e:
        yield Finding("problem", str(e), "a cache that opens a damaged store sets it aside and starts cold")
        return
    except (lmdb.Error, OSError) as e:
        yield Finding("problem", str(translate(e, f"cannot read {directory}")))
        return
    try:
        info = environment.env.info()
        used, slots = int(info["num_readers"]), int(info["max_readers"])
    finally:
        leave(environment, context.logger)
    what = f"the data file is sound at first sight; {used} of {slots} reader slots were used"
    if used > _CROWDED * slots:
        yield Finding("warning", what, "close all users of the store, then open it with a larger max_readers")
    else:
        yield Finding("ok", what)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes < 10 << 30 else f"{nbytes / (1 << 30):,.0f} GiB"

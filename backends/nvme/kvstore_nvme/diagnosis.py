"""What ``kvstore doctor`` says about a directory, without opening the store."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore_lmdb.directory import is_network

from kvstore.backend import BackendContext, Finding
from kvstore.errors import ConfigError
from kvstore_nvme.directory import file_system_of, resolve
from kvstore_nvme.options import DEFAULT_CAPACITY_BYTES, NvmeOptions

_GIB: Final = 1 << 30
_FOREIGN_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_VIRTUAL_DISKS: Final = ("vd", "xvd")
_PROBE_NAME: Final = ".kvstore-probe"


def diagnose(context: BackendContext) -> list[Finding]:
    """Look at the directory, its file system and its disk; raises nothing and leaves nothing behind."""
    options = context.options
    if not isinstance(options, NvmeOptions):
        return [Finding("problem", f"options are {options!r}", "give the options of the nvme backend")]
    try:
        directory = resolve(options.path)
        return [*_look_at(directory, options, context)]
    except ConfigError as e:
        return [Finding("problem", str(e), "name a directory")]
    except OSError as e:
        return [Finding("problem", f"{options.path}: {e.strerror}", "check path, owner and mount")]


def _look_at(directory: Path, options: NvmeOptions, context: BackendContext) -> Iterator[Finding]:
    yield from _permissions(directory)
    nearest = next(p for p in (directory, *directory.parents) if p.is_dir())
    kind = file_system_of(directory)
    if options.layout == "segments" and is_network(kind):
        level = "warning" if options.allow_network_fs else "problem"
        yield Finding(level, f"{directory} lies on the network file system {kind!r}", "use layout = 'tree' there")  # type: ignore[arg-type]
    else:
        disk, turns = _disk(nearest)
        advice = "use a solid-state disk: regions are read in no order" if turns else ""
        yield Finding("warning" if turns else "ok", f"file system {kind or 'unknown'}{disk}", advice)
    yield from _space(directory, nearest, context)
    if options.layout == "segments" and options.direct is not False:
        yield _direct_io(nearest, insists=options.direct is True)


def _permissions(directory: Path) -> Iterator[Finding]:
    if not directory.exists():
        parent = next(p for p in directory.parents if p.is_dir())
        if os.access(parent, os.W_OK | os.X_OK):
            yield Finding("ok", f"{directory} does not exist yet and can be made")
        else:
            yield Finding("problem", f"{directory} cannot be made: {parent} is not writable", "check owner and mode")
        return
    found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        yield Finding("problem", f"{directory} is not a directory", "name one that is or does not exist yet")
    elif not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("problem", f"{directory} is not readable and writable", "check owner, mode and mount options")
    elif found.st_mode & _FOREIGN_WRITE or found.st_uid != os.geteuid():
        mode = stat.S_IMODE(found.st_mode)
        yield Finding("warning", f"{directory} has mode {mode:04o} and uid {found.st_uid}", "chmod 0700 it")
    else:
        yield Finding("ok", f"{directory} is private and writable")


def _disk(path: Path) -> tuple[str, bool]:
    """Say what kind of disk holds ``path``, as far as the kernel tells, and whether it turns."""
    device = path.stat().st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    with suppress(OSError):
        real = base.resolve(strict=True)
        queue = next((p / "queue" for p in (real, real.parent) if (p / "queue").is_dir()), None)
        if queue is not None:
            name = queue.parent.name
            turns = (queue / "rotational").read_text(encoding="ascii").strip() == "1"
            if name.startswith(_VIRTUAL_DISKS):  # they report what their driver happens to say
                return f" on {name} (a virtual disk)", False
            return f" on {name} ({'a spinning disk' if turns else 'solid state'})", turns
    return "", False


def _space(directory: Path, nearest: Path, context: BackendContext) -> Iterator[Finding]:
    wanted = context.capacity_bytes or DEFAULT_CAPACITY_BYTES
    room = os.statvfs(nearest)
    free = room.f_bavail * room.f_frsize
    taken = sum(p.lstat().st_blocks * 512 for p in directory.glob("seg-*")) if directory.is_dir() else 0
    what = f"capacity {_size(wanted)}, free {_size(free)}, taken by the store {_size(taken)}"
    if free + taken < wanted:
        yield Finding("warning", what, "lower 'capacity' or free disk space: the store stays smaller than configured")
    else:
        yield Finding("ok", what)


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= 10 * _GIB else f"{nbytes / (1 << 20):,.0f} MiB"


def _direct_io(folder: Path, *, insists: bool) -> Finding:
    """Try a direct write and read on an unnamed or at once unlinked file."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        try:
            fd = os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError:
            probe = folder / f"{_PROBE_NAME}-{os.getpid()}"
            fd = os.open(probe, flags | os.O_CREAT | os.O_EXCL, 0o600)
            probe.unlink()
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as e:
        level = "problem" if insists else "warning"
        advice = "leave 'direct' out" if insists else "a disk with ext4 or xfs is several times faster per core"
        return Finding(level, f"direct I/O is refused here ({e.strerror}): the page cache is used", advice)  # type: ignore[arg-type]
    return Finding("ok", "direct I/O works")

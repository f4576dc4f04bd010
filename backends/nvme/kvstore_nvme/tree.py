"""The tree layout: one file per pack of blocks, for shared POSIX mounts."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import ClassVar, Final

from kvstore.backend import BackendContext, Capability
from kvstore.errors import (
    BackendPermissionError,
    BackendUnavailableError,
    ConfigError,
    NotSupportedError,
)
from kvstore.objects.backend import ObjectBackend
from kvstore.objects.medium import ObjectMedium
from kvstore.objects.settings import ObjectSettings
from kvstore.private_files import make_private_directory
from kvstore.types import Call
from kvstore_nvme.options import NvmeOptions
from kvstore_nvme.tree_errors import translate
from kvstore_nvme.tree_medium import TreeMedium

FORMAT_KEY: Final = "format"
_FORMAT: Final = b"kvstore tree 1\n"
_SEGMENTS: Final = "seg-"
_THREADS: Final = 4  # a network mount answers more at once, but each thread costs Python time
_SURVEY_S: Final = 60.0
_CHARGE_BYTES: Final = 4096  # what file systems allocate by


class TreeBackend(ObjectBackend):
    """Records in pack files under one directory that any number of machines may share."""

    capabilities: ClassVar[Capability] = ObjectBackend.capabilities | Capability.EVICTS

    def settings(self, context: BackendContext) -> ObjectSettings:
        """Ask the file system every time, which is cheap, and keep ages exactly."""
        return ObjectSettings(
            pack_blocks=_options(context).pack,
            threads=_THREADS,
            positive_ttl_s=0.0,
            negative_ttl_s=0.0,
            epoch_age_s=0.2,
            refresh_after_s=0.0,
            evicts=True,
            survey_interval_s=_SURVEY_S,
            charge_bytes=_CHARGE_BYTES,
        )

    def connect(self, context: BackendContext) -> ObjectMedium:
        """Make or find the directory and prove that it can be used.

        Raises:
            ConfigError: It is no directory, or holds the other layout.
            BackendError: It cannot be used.
        """
        root = _resolve(_options(context).path)
        try:
            if not context.read_only:
                make_private_directory(root)
            _check(root)
            _note_strangers(root, context.logger)
        except FileExistsError as e:
            raise ConfigError(f"backend 'nvme', option 'path': {root} is no directory") from e
        except OSError as e:
            if isinstance(e, FileNotFoundError) and context.read_only:
                raise BackendUnavailableError(f"{root} is not there; it cannot be opened read-only") from e
            raise translate(e, f"opening {root}") from e
        medium = TreeMedium(str(root), context.durability, read_only=context.read_only)
        _check_format(medium, context)
        return medium


def _options(context: BackendContext) -> NvmeOptions:
    options = context.options
    if not isinstance(options, NvmeOptions):
        raise ConfigError(f"tier {context.tier!r}: options must be NvmeOptions, not {options!r}")
    return options


def _resolve(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _note_strangers(root: Path, logger: logging.Logger) -> None:
    """Say that everybody may write there; a group may, because several machines share the tree."""
    found = root.stat()
    if found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        logger.warning("%s has mode %04o: everybody can replace stored records; take that right away", root, mode)


def _check(root: Path) -> None:
    if not stat.S_ISDIR(root.stat().st_mode):
        raise FileExistsError
    with os.scandir(root) as listed:
        if any(entry.name.startswith(_SEGMENTS) for entry in listed):
            msg = f"backend 'nvme', option 'layout': {root} holds segments; name another 'path' for a tree"
            raise ConfigError(msg)


def _check_format(medium: TreeMedium, context: BackendContext) -> None:
    """Leave or find the mark of this layout; a mount that is read-only is used for reading."""
    call = Call.within(5.0)
    body = medium.read(FORMAT_KEY, call)
    if body is None and context.read_only:
        raise BackendUnavailableError(f"{medium.root} holds no tree; it cannot be opened read-only")
    found = bytearray()
    if body is not None:
        with body:
            found = bytearray(min(body.nbytes, 64))
            body.read_into(memoryview(found))
    if bytes(found) == _FORMAT:
        return
    if not _FORMAT.startswith(found.rstrip(b"\0")):
        msg = f"{medium.root} has the mark {bytes(found)!r}; this kvstore reads {_FORMAT!r}: upgrade it"
        raise BackendUnavailableError(msg)
    if context.read_only:
        return
    try:  # there is none, or a power cut left a part of it
        medium.write(FORMAT_KEY, [_FORMAT], call, once=body is None, blocks=0)
    except NotSupportedError as e:
        raise BackendPermissionError(f"{medium.root} is read-only and holds no tree yet") from e

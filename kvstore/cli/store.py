"""Stores at rest: which one is meant, opening it without changing it, reading all its records."""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.backend import Backend, BackendContext, Capability, RecordInfo
from kvstore.config import Config, load_config
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.plugins import Registry
from kvstore.types import Call, ReadStatus

if TYPE_CHECKING:
    from kvstore.config import TierConfig

_BATCH_RECORDS: Final = 32  # enough to spread the cost of a read transaction or a request
_BATCH_S: Final = 60.0  # nobody waits for an answer here; only a medium that hangs must end

DEFAULT_BACKEND: Final = "lmdb"
GUESSED: Final = "directory"
"""Source of a config that was made for a directory whose backend nobody named."""

KINDS: Final = {1: "tokens", 2: "hashes"}


@dataclass(frozen=True, slots=True)
class Store:
    """One tier's backend, opened."""

    tier: TierConfig
    backend: Backend
    registry: Registry

    def codec_name(self, codec_id: int) -> str:
        """Name of a codec, or its number when no installed plugin has it."""
        plugin = self.registry.codec_by_id(codec_id)
        return f"#{codec_id}" if plugin is None else plugin.name


def open_stores(args: argparse.Namespace, *, read_only: bool = True) -> Iterator[Store]:
    """Open the chosen tiers one after the other; each is closed before the next one is opened.

    Tiers that keep nothing after a process has ended are passed over with a note.

    Raises:
        ConfigError: Arguments or config are wrong, or no tier is left.
        BackendError: A tier cannot be opened.
    """
    registry = Registry.discover()
    config = _config(args, registry)
    opened = False
    for tier in chosen(config, args.tier):
        backend = registry.create_backend(tier.backend)
        if Capability.PERSISTENT not in backend.capabilities:
            print(f"kvstore: tier {tier.name!r} keeps nothing at rest, nothing to look into", file=sys.stderr)
            continue
        opened = True
        with _open(tier, backend, read_only=read_only, guessed=config.source == GUESSED):
            yield Store(tier, backend, registry)
    if not opened:
        msg = f'{config.source}: no tier keeps data at rest; expected one such as backend = "lmdb"'
        raise ConfigError(msg)


def _config(args: argparse.Namespace, registry: Registry) -> Config:
    if args.store is not None and args.config is not None:
        msg = f"both {args.store} and --config {args.config} were given; name one of them"
        raise ConfigError(msg)
    if args.store is None:
        return load_config(args.config, registry)
    path = Path(args.store).expanduser()
    if not path.is_dir():
        return load_config(path, registry)
    tier = {"backend": args.backend or DEFAULT_BACKEND, "path": str(path)}
    config = load_config({"l1": {"enabled": False}, "l2": [tier]}, registry)
    # A directory says nothing about its capacity, and a default must not replace the store's own.
    tiers = tuple(replace(tier, capacity=None) for tier in config.l2)
    return replace(config, l2=tiers, source=config.source if args.backend else GUESSED)


def chosen(config: Config, name: str | None) -> list[TierConfig]:
    """Return the tier of that name, or all of them for None.

    Raises:
        ConfigError: There is no such tier.
    """
    if name is None:
        return list(config.l2)
    found = [tier for tier in config.l2 if tier.name == name]
    if not found:
        known = ", ".join(tier.name for tier in config.l2) or "none"
        msg = f"{config.source}: no tier is named {name!r}; its tiers: {known}"
        raise ConfigError(msg)
    return found


@contextmanager
def _open(tier: TierConfig, backend: Backend, *, read_only: bool, guessed: bool) -> Iterator[None]:
    context = BackendContext(
        tier=tier.name,
        options=tier.options,
        capacity_bytes=tier.capacity,
        durability=tier.durability,
        read_only=read_only,
    )
    try:
        try:
            backend.open(context)
        except BackendUnavailableError as e:
            if not guessed:
                raise
            msg = f"{e} (a directory is taken for a store of backend {tier.backend!r}; --backend names another)"
            raise BackendUnavailableError(msg) from e
        yield
    finally:
        backend.close()


def read_all(
    backend: Backend, visit: Callable[[RecordInfo, memoryview], None], *, limit: int | None = None
) -> Counter[ReadStatus]:
    """Show every stored record to ``visit``, one at a time.

    Args:
        backend: Opened, with the capability ``SCAN``.
        visit: Called with what the scan said and the record's bytes, valid during the call.
        limit: Stop after that many records.

    Returns:
        How often each status came up; ``ABSENT`` are records that left during the scan.

    Raises:
        NotSupportedError: The backend cannot list its records.
        BackendError: The medium failed.
    """
    statuses: Counter[ReadStatus] = Counter()
    lock = threading.Lock()
    for infos in _batches(backend.scan(), limit):

        def receive(i: int, view: memoryview, infos: list[RecordInfo] = infos) -> None:
            with lock:
                visit(infos[i], view)

        statuses.update(backend.get_many([info.name for info in infos], receive, Call.within(_BATCH_S)))
    return statuses


def _batches(infos: Iterator[RecordInfo], limit: int | None) -> Iterator[list[RecordInfo]]:
    batch: list[RecordInfo] = []
    for count, info in enumerate(infos):
        if limit is not None and count >= limit:
            break
        batch.append(info)
        if len(batch) == _BATCH_RECORDS:
            yield batch
            batch = []
    if batch:
        yield batch


def unread(statuses: Counter[ReadStatus]) -> int:
    """How many records could not be read although they are there."""
    return sum(count for status, count in statuses.items() if status not in (ReadStatus.OK, ReadStatus.ABSENT))

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
from kvstore.record import HEADER_BYTES, KEYED_ENTRY_BYTES, MAX_SEGMENTS
from kvstore.types import Call, ReadStatus

if TYPE_CHECKING:
    from kvstore.config import TierConfig

_BATCH_RECORDS: Final = 32  # enough to spread the cost of a read transaction or a request
_BATCH_S: Final = 60.0  # nobody waits for an answer here; only a medium that hangs must end

_LARGE_BYTES: Final = 64 << 20
_HEAD_BYTES: Final = 16 << 10  # of a record of up to 64 MiB: 500 segments, of about 256 KiB each
_LONGEST_HEAD_BYTES: Final = HEADER_BYTES + KEYED_ENTRY_BYTES * MAX_SEGMENTS

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


@dataclass(frozen=True, slots=True)
class Named:
    """How a command line names stores.

    Attributes:
        store: A config file, or the directory of a store; None when ``config`` or the environment tells.
        config: A config file.
        tier: Only this tier; None for all.
        backend: Whose directory ``store`` is; None when nobody said.
        create: A directory that is not there yet is meant to be made.
    """

    store: str | None
    config: str | None = None
    tier: str | None = None
    backend: str | None = None
    create: bool = False

    @classmethod
    def by(cls, args: argparse.Namespace, *, create: bool = False) -> Named:
        """Take the arguments that :func:`kvstore.cli.command.add_store_arguments` declares."""
        return cls(args.store, args.config, args.tier, args.backend, create)


@dataclass(frozen=True, slots=True)
class Subject:
    """The one namespace that a store is opened to write; what a cache would tell the backend.

    Attributes:
        namespace: 16-byte digest.
        document: Its readable description; None when nobody kept one.
        block_bytes: Raw bytes of one block.
    """

    namespace: bytes
    document: str | None
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """A tier that keeps data at rest, not opened."""

    tier: TierConfig
    registry: Registry
    config: Config

    @contextmanager
    def opened(self, *, read_only: bool = True, subject: Subject | None = None) -> Iterator[Store]:
        """Open the tier's backend until the context is left.

        Raises:
            ConfigError: An option is wrong.
            BackendError: It cannot be opened.
        """
        tier = self.tier
        backend = self.registry.create_backend(tier.backend)
        context = BackendContext(
            tier=tier.name,
            options=tier.options,
            capacity_bytes=tier.capacity,
            durability=tier.durability,
            read_only=read_only,
        )
        if subject is not None:
            context = replace(context, block_bytes=subject.block_bytes)
            if subject.document is not None:  # without a description, none is to be kept
                context = replace(context, namespace=subject.namespace, namespace_json=subject.document)
        try:
            try:
                backend.open(context)
            except BackendUnavailableError as e:
                if self.config.source != GUESSED:
                    raise
                msg = f"{e} (a directory is taken for a store of backend {tier.backend!r}; --backend names another)"
                raise BackendUnavailableError(msg) from e
            yield Store(tier, backend, self.registry)
        finally:
            backend.close()


def sites(named: Named) -> list[Site]:
    """The tiers that keep data at rest, in the order of the config; the others get a note.

    Raises:
        ConfigError: The names or the config are wrong, or no tier is left.
    """
    registry = Registry.discover()
    config = _config(named, registry)
    found = []
    for tier in chosen(config, named.tier):
        if Capability.PERSISTENT not in registry.create_backend(tier.backend).capabilities:
            print(f"kvstore: tier {tier.name!r} keeps nothing at rest, nothing to look into", file=sys.stderr)
            continue
        found.append(Site(tier, registry, config))
    if not found:
        msg = f'{config.source}: no tier keeps data at rest; expected one such as backend = "lmdb"'
        raise ConfigError(msg)
    return found


def one_site(named: Named, option: str) -> Site:
    """The only tier that keeps data at rest.

    Args:
        named: Which store.
        option: What chooses a tier, for the message.

    Raises:
        ConfigError: As :func:`sites`, or there are several.
    """
    found = sites(named)
    if len(found) > 1:
        msg = f"{found[0].config.source}: has several tiers ({_names(found)}); name one with {option}"
        raise ConfigError(msg)
    return found[0]


def _names(found: list[Site]) -> str:
    return ", ".join(site.tier.name for site in found)


def open_stores(args: argparse.Namespace, *, read_only: bool = True) -> Iterator[Store]:
    """Open the chosen tiers one after the other; each is closed before the next one is opened.

    Tiers that keep nothing after a process has ended are passed over with a note.

    Raises:
        ConfigError: Arguments or config are wrong, or no tier is left.
        BackendError: A tier cannot be opened.
    """
    for site in sites(Named.by(args)):
        with site.opened(read_only=read_only) as store:
            yield store


def _config(named: Named, registry: Registry) -> Config:
    if named.store is not None and named.config is not None:
        msg = f"both {named.store} and --config {named.config} were given; name one of them"
        raise ConfigError(msg)
    if named.store is None:
        return load_config(named.config, registry)
    path = Path(named.store).expanduser()
    made = named.create and named.backend is not None and not path.exists()
    if not path.is_dir() and not made:
        return load_config(path, registry)
    tier = {"backend": named.backend or DEFAULT_BACKEND, "path": str(path)}
    config = load_config({"l1": {"enabled": False}, "l2": [tier]}, registry)
    # A directory says nothing about its capacity, and a default must not replace the store's own.
    tiers = tuple(replace(tier, capacity=None) for tier in config.l2)
    return replace(config, l2=tiers, source=str(path) if named.backend else GUESSED)


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


def read_all(
    backend: Backend,
    visit: Callable[[RecordInfo, memoryview], None],
    *,
    limit: int | None = None,
    wanted: Callable[[RecordInfo], bool] | None = None,
) -> Counter[ReadStatus]:
    """Show every stored record to ``visit``, one at a time.

    Args:
        backend: Opened, with the capability ``SCAN``.
        visit: Called with what the scan said and the record's bytes, valid during the call.
        limit: Stop after that many records.
        wanted: Which records to read; None for all.

    Returns:
        How often each status came up; ``ABSENT`` are records that left during the scan.

    Raises:
        NotSupportedError: The backend cannot list its records.
        BackendError: The medium failed.
    """
    statuses: Counter[ReadStatus] = Counter()
    lock = threading.Lock()
    listed = backend.scan() if wanted is None else filter(wanted, backend.scan())
    for infos in batches(listed, limit):

        def receive(i: int, view: memoryview, infos: list[RecordInfo] = infos) -> None:
            with lock:
                visit(infos[i], view)

        statuses.update(backend.get_many([info.name for info in infos], receive, Call.within(_BATCH_S)))
    return statuses


def read_heads(
    backend: Backend, visit: Callable[[RecordInfo, memoryview], None], *, limit: int | None = None
) -> Counter[ReadStatus]:
    """Like :func:`read_all`, showing the beginning of each record, with all of its head."""
    statuses: Counter[ReadStatus] = Counter()
    lock = threading.Lock()
    for infos in batches(backend.scan(), limit):

        def receive(i: int, view: memoryview, infos: list[RecordInfo] = infos) -> None:
            with lock:
                visit(infos[i], view)

        ranges = [(0, _HEAD_BYTES if info.nbytes <= _LARGE_BYTES else _LONGEST_HEAD_BYTES) for info in infos]
        names = [info.name for info in infos]
        statuses.update(backend.get_ranges(names, ranges, receive, Call.within(_BATCH_S)))
    return statuses


def batches(infos: Iterator[RecordInfo], limit: int | None = None) -> Iterator[list[RecordInfo]]:
    """Cut a listing into batches that one call reads."""
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

"""Opening tiers: bounded in time, and again later when one was not available."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.backend import Backend, BackendContext
from kvstore.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    ConfigError,
    KVStoreError,
    PluginError,
)
from kvstore.l2.gauge import Gauge
from kvstore.l2.reader import TierReader
from kvstore.l2.tier import Tier, TierSettings
from kvstore.l2.workers import Job
from kvstore.l2.writer import Writer

if TYPE_CHECKING:
    from kvstore.config import Config, TierConfig
    from kvstore.events import EventKind
    from kvstore.l2.shelf import CodecShelf, Coding
    from kvstore.namespace import Namespace
    from kvstore.plugins import Registry
    from kvstore.plugins.descriptors import Admit
    from kvstore.spec import BlockSpec

logger = logging.getLogger("kvstore.cache")

OPEN_S: Final = 10.0  # a medium that takes longer to open is treated as one that is not there
FIRST_RETRY_S: Final = 30.0  # until a tier that was not available is tried again; doubled each time
LONGEST_RETRY_S: Final = 600.0
_QUEUE_WITHOUT_L1: Final = 256 << 20  # bytes; a quarter of L1's default otherwise


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bytes of one cache are.

    Attributes:
        spec: Shape and dtype of its blocks.
        namespace: Who computed them.
        digest: 16 bytes covering both.
        coding: How its records are made and who must have made them.
    """

    spec: BlockSpec
    namespace: Namespace
    digest: bytes
    coding: Coding


@dataclass(frozen=True, slots=True)
class OpenTier:
    """An L2 tier with its read and its write side."""

    tier: Tier
    reader: TierReader
    writer: Writer
    gauge: Gauge

    @property
    def admit(self) -> Admit:
        """Which blocks the tier takes."""
        return self.tier.settings.config.admit or "all"


@dataclass(frozen=True, slots=True)
class TierListeners:
    """Who is told what happens in tiers.

    Attributes:
        removed: A medium evicted records: the tier's settings and the names.
        new_epoch: Another process cleared the namespace.
        event: Something for the observers.
    """

    removed: Callable[[TierSettings, Sequence[bytes]], None]
    new_epoch: Callable[[], None]
    event: Callable[[EventKind, str, Sequence[bytes], str], None]


class TierOpener:
    """Makes tiers from their config.

    Args:
        config: The cache's.
        identity: What its blocks are.
        registry: Where backends come from.
        shelf: Codecs for the tiers.
        listeners: Who is told what happens there.
    """

    def __init__(
        self, config: Config, identity: Identity, registry: Registry, shelf: CodecShelf, listeners: TierListeners
    ) -> None:
        self._config = config
        self._identity = identity
        self._registry = registry
        self._shelf = shelf
        self._listeners = listeners

    def open(self, index: int) -> OpenTier:
        """Open the tier at ``index`` of the config; takes about 10 s at most.

        Raises:
            ConfigError: An option is wrong.
            PluginError: The backend does not keep to the contract.
            BackendError: The medium cannot be used, or does not answer.
        """
        config = self._config.l2[index]
        settings = self._settings(index, config)
        seals = self._seals(settings)
        backend = self._registry.create_backend(config.backend)
        _open_in_time(backend, self._context(settings, seals=seals), config.backend)
        tier = Tier(settings, backend)
        gauge = Gauge(tier)
        stored = self._listeners.event
        try:
            writer = Writer(
                tier, self._shelf, gauge, on_stored=lambda digests: stored("stored", config.name, digests, "")
            )
        except PluginError:
            tier.close()
            raise
        return OpenTier(tier, TierReader(tier, self._shelf), writer, gauge)

    def _settings(self, index: int, config: TierConfig) -> TierSettings:
        plugin = self._registry.backend(config.backend)
        return TierSettings(
            config=config,
            plugin=plugin,
            index=index,
            deadline_s=config.deadline or plugin.default_deadline_s or self._config.defaults.deadline,
            queue_bytes=max(config.queue or self._default_queue_bytes(), self._identity.spec.nbytes),
            namespace=self._identity.digest,
            on_new_epoch=self._listeners.new_epoch,
            on_event=self._listeners.event,
        )

    def _default_queue_bytes(self) -> int:
        l1 = self._config.l1
        return l1.capacity // 4 if l1.enabled else _QUEUE_WITHOUT_L1

    def _seals(self, settings: TierSettings) -> bool:
        """Whether the tier's codec seals; makes it once, so that what is wrong with it shows at open.

        Raises:
            ConfigError: It cannot be used as it is set up.
            PluginError: It is broken, or the backend's choice although it seals.
        """
        config, plugin = settings.config, settings.plugin
        if config.codec != "auto":
            return self._shelf.seals(config.codec)
        if self._shelf.seals(plugin.default_codec):
            msg = (
                f"backend {plugin.name!r} chooses the codec {plugin.default_codec!r}, which seals; that is for the "
                f"config to decide: name it in tier {config.name!r}, or another codec"
            )
            raise PluginError(msg)
        return False

    def _context(self, settings: TierSettings, *, seals: bool) -> BackendContext:
        config, spec = settings.config, self._identity.spec
        capacity = config.capacity
        return BackendContext(
            tier=config.name,
            options=config.options,
            capacity_bytes=settings.plugin.default_capacity_bytes if capacity is None else capacity,
            durability=config.durability,
            namespace=self._identity.digest,
            namespace_json=self._identity.namespace.to_json(spec),
            removed=lambda names: self._listeners.removed(settings, names),
            block_bytes=spec.nbytes + (self._shelf.shape.longest_seal_bytes if seals else 0),
        )


def _open_in_time(backend: Backend, context: BackendContext, plugin: str) -> None:
    """Open a backend in a thread of its own; whatever it raises becomes one of the contract's errors.

    One that opens too late is closed again by that thread.
    """

    def late() -> None:
        if job.error is None:
            backend.close()

    job: Job[None] = Job(lambda: backend.open(context), late)
    threading.Thread(target=job.run, name=f"kvstore-{context.tier}-open", daemon=True).start()
    try:
        opened = job.wait(OPEN_S)
    except BaseException:  # interrupted: nobody will use what is still being opened
        job.wait(0)
        raise
    if not opened:
        msg = (
            f"tier {context.tier!r}: backend {plugin!r} did not open within {OPEN_S:g} s; check that its medium "
            "answers, or set required = false to start without it"
        )
        raise BackendTimeoutError(msg)
    try:
        job.outcome()
    except (ConfigError, PluginError, BackendError):
        raise
    except Exception as e:
        msg = f"tier {context.tier!r}: backend {plugin!r} raised {type(e).__name__} when it was opened: {e}"
        raise BackendUnavailableError(msg) from e


@dataclass(slots=True)
class AbsentTier:
    """A tier that could not be opened and is not required.

    Attributes:
        index: Its place in the config.
        error: Why not.
        pause_s: Seconds until the next attempt.
        next_at: When that is, on the monotonic clock.
        attempt: The thread that tries now.
    """

    index: int
    error: str
    pause_s: float = field(default_factory=lambda: FIRST_RETRY_S)
    next_at: float = 0.0
    attempt: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.next_at = time.monotonic() + self.pause_s


class AbsentTiers:
    """Tiers to be tried again in the background; thread-safe.

    Args:
        opener: Opens them.
        joined: Told each one that was opened.
    """

    def __init__(self, opener: TierOpener, joined: Callable[[OpenTier], None]) -> None:
        self._opener = opener
        self._joined = joined
        self._lock = threading.Lock()
        self._absent: dict[str, AbsentTier] = {}

    def add(self, name: str, index: int, error: BackendError) -> None:
        """Note a tier that is not available; says so once."""
        absent = self._absent[name] = AbsentTier(index, str(error))
        logger.warning("tier %r is not available and is left out until it can be opened: %s", name, absent.error)

    @property
    def errors(self) -> dict[str, str]:
        """Why each one is not available."""
        with self._lock:
            return {name: absent.error for name, absent in self._absent.items()}

    def retry(self) -> None:
        """Start the attempts that are due, each in a thread of its own; returns at once."""
        now = time.monotonic()
        with self._lock:
            due = [(n, a) for n, a in self._absent.items() if a.attempt is None and now >= a.next_at]
            for name, absent in due:
                absent.attempt = threading.Thread(
                    target=self._try, args=(name, absent), name=f"kvstore-{name}-reopen", daemon=True
                )
        for _, absent in due:
            if absent.attempt is not None:
                absent.attempt.start()

    def _try(self, name: str, absent: AbsentTier) -> None:
        try:
            open_tier = self._opener.open(absent.index)
        except KVStoreError as e:
            with self._lock:
                absent.error = str(e)
                absent.pause_s = min(2 * absent.pause_s, LONGEST_RETRY_S)
                absent.next_at = time.monotonic() + absent.pause_s
                absent.attempt = None
            return
        with self._lock:
            self._absent.pop(name, None)
        logger.warning("tier %r is available now and joins", name)
        self._joined(open_tier)

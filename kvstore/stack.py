"""Everything an open cache holds in one process: L1, tiers, write queues, upkeep thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.backend import Backend, BackendContext
from kvstore.counting import Counting
from kvstore.errors import BackendError, BackendUnavailableError, ConfigError, KVStoreError, PluginError
from kvstore.events import CacheEvent, EventKind
from kvstore.l1.cache import L1Cache
from kvstore.l2.reader import TierReader
from kvstore.l2.shelf import CodecShelf
from kvstore.l2.tier import Tier, TierSettings
from kvstore.l2.writer import Writer
from kvstore.seen import SeenOnce
from kvstore.stats import CacheCounters, Health, Stats, TierHealth, TierStats

if TYPE_CHECKING:
    from kvstore.config import Config, TierConfig
    from kvstore.namespace import Namespace
    from kvstore.plugins import Registry
    from kvstore.spec import BlockSpec

logger = logging.getLogger("kvstore.cache")

_UPKEEP_S: Final = 1.0
_CLOSE_S: Final = 4.0  # of the 5 s a close may take; the rest is for the backends
_QUEUE_WITHOUT_L1: Final = 256 << 20  # bytes; a quarter of L1's default otherwise
_MAX_EVENTS: Final = 4096  # per upkeep round; more are dropped rather than held


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bytes of one cache are.

    Attributes:
        spec: Shape and dtype of its blocks.
        namespace: Who computed them.
        digest: 16 bytes covering both.
    """

    spec: BlockSpec
    namespace: Namespace
    digest: bytes


@dataclass(slots=True)
class OpenTier:
    """An L2 tier with its read and its write side."""

    tier: Tier
    reader: TierReader
    writer: Writer

    @property
    def hot_only(self) -> bool:
        """Whether the tier takes a block at its second use only."""
        return self.tier.settings.config.admit == "hot"


@dataclass(slots=True)
class Events:
    """Events waiting for the observers; appended from any thread, taken by the upkeep thread."""

    wanted: bool
    waiting: list[CacheEvent] = field(default_factory=list)

    def add(self, event: CacheEvent) -> None:
        """Keep an event unless nobody wants it or too many wait already."""
        if self.wanted and len(self.waiting) < _MAX_EVENTS:
            self.waiting.append(event)

    def take(self) -> list[CacheEvent]:
        """Everything that waits."""
        taken, self.waiting = self.waiting, []
        return taken


class Stack:
    """The opened parts of a cache; made anew in a forked child.  Thread-safe."""

    def __init__(self, cache_id: str, config: Config, identity: Identity, registry: Registry) -> None:
        self.cache_id = cache_id
        self.config = config
        self.identity = identity
        self.registry = registry
        self.counters = Counting(CacheCounters())
        self.seen = SeenOnce()
        """Blocks that a tier delivered once; the second time they are promoted into L1."""
        self.put_once = SeenOnce()
        """Blocks that were put or used once; tiers with ``admit = "hot"`` take them the second time."""
        self._observers = registry.observers()
        self.events = Events(wanted=bool(self._observers))
        self.shelf = CodecShelf(registry, identity.spec, identity.digest)
        self.marks = threading.Lock()
        """Guards the ``stored`` and ``pending`` masks of L1 entries."""
        self.l1 = self._make_l1()
        self.tiers: list[OpenTier] = []
        self.failed: dict[str, str] = {}
        self._stop = threading.Event()
        self._upkeep: threading.Thread | None = None
        try:
            for index, tier_config in enumerate(config.l2):
                self._open_tier(index, tier_config)
        except BaseException:
            self.close()
            raise
        self._upkeep = threading.Thread(target=self._run_upkeep, name="kvstore-upkeep", daemon=True)
        self._upkeep.start()

    # -- opening

    def _make_l1(self) -> L1Cache | None:
        config = self.config.l1
        if not config.enabled:
            return None
        l1 = L1Cache(
            self.identity.spec,
            config.capacity,
            lambda capacity_blocks: self.registry.create_policy(config.policy, capacity_blocks),
            device=config.device,
        )
        l1.reclaim = self._take_back
        return l1

    def _open_tier(self, index: int, config: TierConfig) -> None:
        plugin = self.registry.backend(config.backend)
        settings = TierSettings(
            config=config,
            plugin=plugin,
            index=index,
            deadline_s=config.deadline or plugin.default_deadline_s or self.config.defaults.deadline,
            queue_bytes=config.queue or self._default_queue_bytes(),
            namespace=self.identity.digest,
            on_new_epoch=self._cleared_elsewhere,
            on_event=self._emit,
        )
        backend = self.registry.create_backend(config.backend)
        context = BackendContext(
            tier=config.name,
            options=config.options,
            capacity_bytes=config.capacity if config.capacity is not None else plugin.default_capacity_bytes,
            durability=config.durability,
            namespace=self.identity.digest,
            namespace_json=self.identity.namespace.to_json(self.identity.spec),
            removed=lambda names: self._removed(settings, names),
        )
        try:
            _open_backend(backend, context, config.backend)
        except BackendError as e:
            if config.required:
                raise
            self.failed[config.name] = str(e)
            logger.warning("tier %r is not available and will be left out: %s", config.name, e)
            return
        tier = Tier(settings, backend)
        writer = Writer(tier, self.shelf, on_stored=lambda digests: self._emit("stored", config.name, digests))
        self.tiers.append(OpenTier(tier, TierReader(tier, self.shelf), writer))

    def _default_queue_bytes(self) -> int:
        l1 = self.config.l1
        wanted = l1.capacity // 4 if l1.enabled else _QUEUE_WITHOUT_L1
        return max(wanted, self.identity.spec.nbytes)

    # -- what tiers tell

    def _take_back(self, blocks: int) -> int:
        return sum(open_tier.writer.take_back(blocks) for open_tier in self.tiers)

    def _cleared_elsewhere(self) -> None:
        if self.l1 is not None:
            self.l1.clear()
        self.forget()

    def forget(self) -> None:
        """Drop what is remembered about uses, after a clear."""
        self.seen.clear()
        self.put_once.clear()

    def _removed(self, settings: TierSettings, names: Sequence[bytes]) -> None:
        """Blocks that a medium evicted are no longer known to be there."""
        digests = [name[17:] for name in names]
        if self.l1 is not None:
            kept = ~(1 << settings.index)
            entries = [e for e in self.l1.pin_each(digests) if e is not None]
            with self.marks:
                for entry in entries:
                    entry.stored &= kept
            self.l1.unpin(entries)
        for open_tier in self.tiers:
            if open_tier.tier.name == settings.name:
                open_tier.tier.counters.add(evicted=len(names))
        self._emit("removed", settings.name, digests)

    def _emit(self, kind: EventKind, tier: str, digests: Sequence[bytes], detail: str = "") -> None:
        if self.events.wanted and (digests or kind == "tier"):
            self.events.add(CacheEvent(kind, self.cache_id, tier, tuple(digests), detail))

    # -- upkeep

    def _run_upkeep(self) -> None:
        while not self._stop.wait(_UPKEEP_S):
            for open_tier in self.tiers:
                open_tier.tier.maintain()
            if self.l1 is not None:
                self.l1.tidy()
            self.deliver_events()

    def deliver_events(self) -> None:
        """Hand waiting events to the observers; their errors are counted and logged, not raised."""
        if events := self.events.take():
            for observer in self._observers:
                observer(events)

    # -- state

    def stats(self) -> Stats:
        """Counters of every part."""
        return Stats(
            cache_id=self.cache_id,
            cache=self.counters.snapshot(),
            l1=None if self.l1 is None else self.l1.counters,
            tiers=tuple(self._tier_stats(t) for t in self.tiers),
        )

    def _tier_stats(self, open_tier: OpenTier) -> TierStats:
        tier = open_tier.tier
        counters, queued = tier.counters.snapshot(), open_tier.writer.queued_bytes
        usage = tier.usage()
        if usage is None:
            return TierStats(tier.name, counters, queued)
        return TierStats(
            name=tier.name,
            counters=counters,
            queued_bytes=queued,
            records=usage.records,
            payload_bytes=usage.payload_bytes,
            file_bytes=usage.file_bytes,
            capacity_bytes=usage.capacity_bytes,
        )

    def health(self) -> Health:
        """State of every tier."""
        tiers = {t.tier.name: _health_of(t.tier) for t in self.tiers}
        tiers |= {name: TierHealth("down", error) for name, error in self.failed.items()}
        if all(t.state == "ok" for t in tiers.values()):
            return Health("ok", tiers)
        serving = self.l1 is not None or any(t.state != "down" for t in tiers.values())
        return Health("degraded" if serving else "down", tiers)

    # -- end

    def flush(self, timeout_s: float | None) -> list[str]:
        """Wait for the write queues; returns the tiers that did not settle in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        late = []
        for open_tier in self.tiers:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not open_tier.writer.flush(left):
                late.append(open_tier.tier.name)
        return late

    def close(self) -> None:
        """Write out what fits into the time, then release everything; at most about 5 s."""
        deadline = time.monotonic() + _CLOSE_S
        self._stop.set()
        closers = [threading.Thread(target=self._close_tier, args=(t, deadline), daemon=True) for t in self.tiers]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(0.1, deadline + 0.9 - time.monotonic()))
        if self._upkeep is not None:
            self._upkeep.join(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(KVStoreError):
            self.deliver_events()
        if self.l1 is not None:
            self.l1.close()

    @staticmethod
    def _close_tier(open_tier: OpenTier, deadline: float) -> None:
        open_tier.writer.close(max(0.1, deadline - 0.5 - time.monotonic()))
        open_tier.tier.close()

    def __iter__(self) -> Iterator[OpenTier]:
        return iter(self.tiers)


def _open_backend(backend: Backend, context: BackendContext, plugin: str) -> None:
    """Open a backend; whatever else than the contract's errors it raises becomes one of them."""
    try:
        backend.open(context)
    except (ConfigError, PluginError, BackendError):
        raise
    except Exception as e:
        msg = f"tier {context.tier!r}: backend {plugin!r} raised {type(e).__name__} when it was opened: {e}"
        raise BackendUnavailableError(msg) from e


def _health_of(tier: Tier) -> TierHealth:
    if tier.suspended:
        return TierHealth("down", tier.last_error)
    if tier.last_error:
        return TierHealth("degraded", tier.last_error)
    if tier.refusal:
        return TierHealth("degraded", f"nothing is stored: {tier.refusal}")
    return TierHealth("ok")

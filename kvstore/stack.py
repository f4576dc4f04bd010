"""Everything an open cache holds in one process: L1, tiers, write queues, upkeep thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.counting import Counting
from kvstore.demotion import Demotions
from kvstore.errors import BackendError, KVStoreError
from kvstore.events import CacheEvent, EventKind
from kvstore.gate import Gate
from kvstore.history import Event, History
from kvstore.l1.cache import L1Cache
from kvstore.l1.device_cache import DeviceCache
from kvstore.l1.pinned import accelerator_in_use
from kvstore.l2.shelf import CodecShelf
from kvstore.opening import AbsentTiers, Identity, OpenTier, TierListeners, TierOpener
from kvstore.queueing import Queueing
from kvstore.seen import SeenOnce, Settled
from kvstore.stats import CacheCounters, Health, Stats, TierHealth, TierStats

if TYPE_CHECKING:
    from kvstore.config import Config
    from kvstore.l2.tier import Tier, TierSettings
    from kvstore.plugins import Registry

logger = logging.getLogger("kvstore.cache")

__all__ = ["Events", "Identity", "OpenTier", "Stack"]

_UPKEEP_S: Final = 1.0
_UPKEEP_JOIN_S: Final = 0.5  # a round takes milliseconds unless a medium hangs
_CLOSE_S: Final = 4.0  # of the 5 s a close may take; the rest is for the backends
_DRAIN_SHARE: Final = 0.6  # of that, for queueing blocks that only L1 holds
_SETTLED_ROUNDS: Final = 10  # upkeep rounds after which uses are told to tiers for hot blocks again
_EVICTED_BLOCKS: Final = 1 << 12  # of L1, remembered for explain: 0.4 MiB
_MAX_EVENTS: Final = 4096  # per upkeep round; more are dropped rather than held


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
        self.gate = Gate(config.gate, identity.spec.block_tokens)
        """Says which tiers are not worth asking, because the engine computes faster."""
        self.seen = SeenOnce()
        """Blocks that a tier delivered once; the second time they are promoted into L1."""
        self.put_once = SeenOnce()
        """Blocks that were put or used once; tiers with ``admit = "hot"`` take them the second time."""
        self.settled = Settled()
        """Blocks that every tier with ``admit = "hot"`` is known to hold."""
        self._observers = registry.observers()
        self.events = Events(wanted=bool(self._observers))
        self.marks = threading.Lock()
        """Guards the ``stored`` and ``pending`` masks of L1 entries."""
        self.l1_history = History()
        self.l1 = self._make_l1()
        self.queueing = Queueing(self.l1, self.marks, identity.spec.nbytes)
        self.demotions = self._make_demotions()
        self.tiers: tuple[OpenTier, ...] = ()
        """Open tiers in lookup order; replaced as a whole when one joins."""
        self.hot_tiers: tuple[OpenTier, ...] = ()
        listeners = TierListeners(self._removed, self._cleared_elsewhere, self._emit)
        shelf = CodecShelf(registry, identity.spec, identity.digest, identity.coding)
        shelf.check()
        opener = TierOpener(config, identity, registry, shelf, listeners)
        self._absent = AbsentTiers(opener, self._joined)
        self._changing = threading.Lock()
        self._stop = threading.Event()
        self._upkeep: threading.Thread | None = None
        try:
            for index, tier_config in enumerate(config.l2):
                try:
                    self._joined(opener.open(index))
                except BackendError as e:
                    if tier_config.required:
                        raise
                    self._absent.add(tier_config.name, index, e)
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
        )
        l1.reclaim = self._take_back
        l1.keep_evicted(_EVICTED_BLOCKS)
        near = DeviceCache.open(config.device, self.identity.spec.nbytes, config.device_capacity)
        if near is not None:
            l1.keep_near(near)
        if config.pin == "auto" and (near is not None or accelerator_in_use()):
            l1.pool.pin()
        return l1

    def _make_demotions(self) -> Demotions | None:
        if self.l1 is None or all(tier.admit != "evicted" for tier in self.config.l2):
            return None
        return Demotions(self.l1, self.queueing, self.identity.spec.nbytes)

    def _joined(self, open_tier: OpenTier) -> None:
        """Take in an open tier, now or later; one that comes after the close is closed."""
        with self._changing:
            late = self._stop.is_set()
            if not late:
                self.gate.join(open_tier.reader)
                tiers = sorted((*self.tiers, open_tier), key=lambda t: t.tier.settings.index)
                self.tiers = tuple(tiers)
                self.hot_tiers = tuple(t for t in tiers if t.admit == "hot")
                if self.demotions is not None:
                    self.demotions.use([t for t in tiers if t.admit == "evicted"])
        if late:
            open_tier.tier.close()
        self.settled.clear()

    # -- what tiers tell

    def _take_back(self, blocks: int) -> int:
        return sum(open_tier.writer.take_back(blocks) for open_tier in self.tiers)

    def _cleared_elsewhere(self) -> None:
        self.clear_l1("by another cache or process")
        self.forget()

    def clear_l1(self, by: str) -> None:
        """Empty L1 and remember what was there."""
        if self.l1 is not None:
            self.l1_history.note(self.l1.clear(), Event.CLEARED, by)

    def forget(self) -> None:
        """Drop what is remembered about uses, after a clear."""
        self.seen.clear()
        self.put_once.clear()
        self.settled.clear()

    def second_uses(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these had a use before this one, which is noted; none without tiers for hot blocks."""
        if not self.hot_tiers:
            return set()
        before = self.put_once.among(digests)
        self.put_once.note(digests)
        return before

    def _removed(self, settings: TierSettings, names: Sequence[bytes]) -> None:
        """Blocks that a medium evicted are no longer known to be there."""
        digests = [name[17:] for name in names]
        self.settled.forget(digests)
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
                open_tier.tier.note_names(names, Event.EVICTED)
        self._emit("removed", settings.name, digests)

    def _emit(self, kind: EventKind, tier: str, digests: Sequence[bytes], detail: str = "") -> None:
        if self.events.wanted and (digests or kind == "tier"):
            self.events.add(CacheEvent(kind, self.cache_id, tier, tuple(digests), detail))

    # -- upkeep

    def _run_upkeep(self) -> None:
        for rounds in itertools.count(1):
            if self._stop.wait(_UPKEEP_S):
                return
            self._absent.retry()
            if rounds % _SETTLED_ROUNDS == 0:
                self.settled.clear()
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
            prefill_tokens_per_s=self.gate.prefill_tokens_per_s,
        )

    def _tier_stats(self, open_tier: OpenTier) -> TierStats:
        tier = open_tier.tier
        counters, queued = tier.counters.snapshot(), open_tier.writer.queued_bytes
        learned = open_tier.reader.times.known
        stats = TierStats(
            name=tier.name,
            counters=counters,
            queued_bytes=queued,
            load_latency_s=0.0 if learned is None else learned.latency_s,
            load_bytes_per_s=0.0 if learned is None else learned.bytes_per_s(self.identity.spec.nbytes),
        )
        usage = open_tier.gauge.usage()
        if usage is None:
            return stats
        return dataclasses.replace(
            stats,
            records=usage.records,
            payload_bytes=usage.payload_bytes,
            file_bytes=usage.file_bytes,
            capacity_bytes=usage.capacity_bytes,
            orphaned_bytes=usage.orphaned_bytes,
        )

    def health(self) -> Health:
        """State of every tier."""
        tiers = {t.tier.name: _health_of(t.tier) for t in self.tiers}
        tiers |= {name: TierHealth("down", error) for name, error in self.absent_errors.items()}
        if all(t.state == "ok" for t in tiers.values()):
            return Health("ok", tiers)
        serving = self.l1 is not None or any(t.state != "down" for t in tiers.values())
        return Health("degraded" if serving else "down", tiers)

    @property
    def absent_errors(self) -> dict[str, str]:
        """Why each tier that is left out could not be opened, by its name."""
        return self._absent.errors

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
        with self._changing:
            self._stop.set()
        if self.demotions is not None:
            self.demotions.drain(time.monotonic() + _DRAIN_SHARE * _CLOSE_S)
        if self._upkeep is not None:  # it may be with a tier at the moment
            self._upkeep.join(_UPKEEP_JOIN_S)
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


def _health_of(tier: Tier) -> TierHealth:
    if tier.suspended:
        return TierHealth("down", tier.last_error)
    if tier.last_error:
        return TierHealth("degraded", tier.last_error)
    if tier.refusal:
        return TierHealth("degraded", f"nothing is stored: {tier.refusal}")
    return TierHealth("ok")

"""The tier without vLLM: lookups, transfers, events and resets over one kvstore cache."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore import KVCache
from kvstore.engines.store_config import load_store_config
from kvstore.namespace import Namespace
from kvstore.plugins import Registry
from kvstore.types import Presence
from kvstore_vllm.layout import RowLayout
from kvstore_vllm.lookups import Lookups
from kvstore_vllm.observing import KnownBlocks, observe
from kvstore_vllm.offload_keys import KeyRun, OffloadKeys
from kvstore_vllm.options import TierOptions
from kvstore_vllm.rows import PrimaryRows
from kvstore_vllm.transfers import Outcome, Transfer, Transfers

if TYPE_CHECKING:
    from kvstore.events import CacheEvent

logger = logging.getLogger("kvstore.vllm")

_DRAIN_LOG_S: Final = 5.0
# Keys of a request that are asked for at first, twice as many each time after that: a prompt that is not
# stored costs the work of one slice, whatever its length.
_FIRST_SLICE: Final = 64
_LOOKUP_THREADS: Final = 2  # one may wait for a medium that hangs, the other goes on


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """Blocks that were stored or removed, in vLLM's keys."""

    keys: list[bytes]
    removed: bool


class StoreTier:
    """Serves vLLM's scheduler from a store and never makes it wait.

    Every method but :meth:`drain` and :meth:`close` returns within microseconds.  They are called by
    one thread at a time.

    Args:
        options: The tier's options.
        layout: What a row is.
        namespace: Whose KV it is.
        rows: vLLM's CPU cache.
        want_events: Whether :meth:`take_events` is called.
        registry: Plugins to choose from; by default those that are installed.

    Raises:
        ConfigError: The store's config is wrong.
        PluginError: A plugin it names cannot be used.
        BackendError: A required tier cannot be opened.
    """

    def __init__(  # noqa: PLR0913 - the parts it is made of; vLLM's constructor arguments are elsewhere
        self,
        *,
        options: TierOptions,
        layout: RowLayout,
        namespace: Namespace,
        rows: PrimaryRows,
        want_events: bool = False,
        registry: Registry | None = None,
    ) -> None:
        registry = registry if registry is not None else Registry.discover()
        config = load_store_config(options.config, registry, salt=options.salt)
        self._open = False
        observe(registry, self._notice)
        self.lookups = Lookups(ttl_s=options.lookup_ttl, wait_s=options.lookup_timeout)
        self._options = options
        self._prefix_only = layout.prefix_only
        self._want_events = want_events
        self._events: list[KeyEvent] = []
        self._events_lock = threading.Lock()
        self._known = KnownBlocks()
        self._keys = OffloadKeys(
            block_tokens=layout.spec.block_tokens,
            group_tokens=layout.group_tokens,
            known=self._known,
            salt=options.salt,
        )
        self._rows = rows
        self._logged = False
        self._judges = config.gate.enabled and config.gate.prefill_tokens_per_s > 0
        self.cache = KVCache.open(config, spec=layout.spec, namespace=namespace, registry=registry)
        self.transfers = Transfers(
            self.cache,
            rows,
            self._keys,
            workers=options.workers,
            room_s=options.store_timeout,
            on_accepted=self.lookups.accepted,
        )
        self._askers = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="kvstore-vllm-lookup")
        self._open = True

    # -- lookups

    def find(self, key: bytes, context: Any) -> bool | None:
        """Say whether a block is in the store; None: ask again at the next step."""
        return self.lookups.find(key, context) if self._open else False

    def ask(self) -> None:
        """Send the questions of this step off; called once at its end."""
        batch = self.lookups.take()
        if not batch or not self._open:
            return
        by_request: dict[int, tuple[Any, list[bytes]]] = {}
        for key, context in batch:
            by_request.setdefault(id(context), (context, []))[1].append(key)
        for context, keys in by_request.values():
            self._askers.submit(self._answer, keys, context)

    def _answer(self, keys: list[bytes], context: Any) -> None:
        """Ask the store, in slices: what follows an absent block is often of no use."""
        first, n_keys = 0, _FIRST_SLICE
        while first < len(keys):
            part = keys[first : first + n_keys]
            present, guessed = self._presence(part, context)
            if self._prefix_only and not all(present):
                rest = len(keys) - first - len(part)
                part, present, guessed = keys[first:], present + [False] * rest, guessed + [True] * rest
            self.lookups.answered(part, present, guessed=guessed)
            first += len(part)
            n_keys *= 2
            time.sleep(0)  # lets the scheduler's thread have the interpreter

    def _presence(self, keys: list[bytes], context: Any) -> tuple[list[bool], list[bool]]:
        """Per key: whether its block is there, and whether that is a guess."""
        present, guessed = [False] * len(keys), [True] * len(keys)
        try:
            for run in self._keys.runs(keys, context):
                for i, (there, guess) in zip(run.indices, self._presence_in_run(run), strict=True):
                    present[i], guessed[i] = there, guess
        except Exception:
            if not self._logged:
                self._logged = True
                logger.exception("a lookup of %d blocks failed: they count as absent, and so will others", len(keys))
        return present, guessed

    def _presence_in_run(self, run: KeyRun) -> list[tuple[bool, bool]]:
        if self._prefix_only:
            # Not asking for what follows the first absent block saves a distant medium a request per block.
            n_blocks = self.cache.lookup(run.key).blocks
            return [(i < n_blocks, i > n_blocks) for i in range(len(run.key))]
        found = self.cache.contains_each(run.key)
        return [(presence is Presence.PRESENT, presence is Presence.UNKNOWN) for presence in found]

    # -- transfers

    def store(self, transfer: Transfer) -> None:
        """Start storing; what is known to be there is skipped."""
        self.transfers.submit(transfer, frozenset(key for key in transfer.keys if self.lookups.known_present(key)))

    def load(self, transfer: Transfer) -> None:
        """Start loading."""
        self.transfers.submit(transfer)

    def finished(self) -> list[Outcome]:
        """Jobs that ended since the last call; what failed to load is a miss from now on."""
        outcomes = self.transfers.take()
        for outcome in outcomes:
            if outcome.transfer.is_load and outcome.failed:
                self.lookups.failed(outcome.failed)
        return outcomes

    @property
    def busy(self) -> bool:
        """Whether the engine has to go on stepping for jobs or lookups."""
        return self.transfers.pending or self.lookups.waiting

    # -- events

    def take_events(self) -> list[KeyEvent]:
        """What was stored and removed since the last call."""
        if not self._events:
            return []
        with self._events_lock:
            events, self._events = self._events, []
        return events

    def _notice(self, events: Sequence[CacheEvent]) -> None:
        """Called by the cache's background thread."""
        if not self._open:
            return
        for event in events:
            if event.kind not in {"stored", "removed"} or event.tier == "l1":
                continue
            keys = self._known.of(event.digests)
            if not keys:
                continue
            if event.kind == "stored":
                if self._judges:
                    self.lookups.accepted(keys)  # to be asked: whether they are worth loading is known then
                else:
                    self.lookups.stored(keys)
                self._tell(keys, removed=False)
            elif len(self.cache.config.l2) == 1:
                self._gone(keys)
            else:  # another tier may still have them: better asked again than believed
                self._askers.submit(self._confirm_removed, keys)

    def _confirm_removed(self, keys: list[bytes]) -> None:
        for run in self._keys.runs(keys, None):
            found = self.cache.contains_each(run.key)
            gone = [keys[i] for i, p in zip(run.indices, found, strict=True) if p is Presence.ABSENT]
            if gone:
                self._gone(gone)

    def _gone(self, keys: list[bytes]) -> None:
        self.lookups.removed(keys)
        self._tell(keys, removed=True)

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if self._want_events:
            with self._events_lock:
                self._events.append(KeyEvent(keys, removed))

    # -- the end of things

    def drain(self) -> None:
        """Wait until no transfer touches vLLM's memory, then do what a reset is to do to the store.

        vLLM calls this when its caches are reset: for new weights, before sleep, on demand.
        """
        started = time.monotonic()
        while not self.transfers.wait(_DRAIN_LOG_S):
            logger.warning("still draining transfers after %.0f s", time.monotonic() - started)
        self.reset()

    def reset(self) -> None:
        """Make what was stored before unreachable, unless ``on_reset`` is ``"keep"``."""
        if self._options.on_reset == "keep" or not self._open:
            return
        if self._options.on_reset == "part" or not self._cleared():
            # Blocks that could not be cleared may be of the old weights: never ask for them again.
            self._keys.part(uuid.uuid4().hex)
        self.lookups.clear()

    def _cleared(self) -> bool:
        """Clear the namespace in every tier; False when one of them could not be reached."""
        before = self._troubles()
        try:
            self.cache.clear()
        except Exception:
            logger.exception("the store could not be cleared; this process goes on under a salt of its own")
            return False
        done = self._troubles() == before and len(self.cache.stats().tiers) == len(self.cache.config.l2)
        if not done:
            logger.warning("a tier of the store could not be cleared; this process goes on under a salt of its own")
        return done

    def _troubles(self) -> int:
        counters = [tier.counters for tier in self.cache.stats().tiers]
        return sum(c.io_errors + c.timeouts + c.rejected_by_breaker + c.late for c in counters)

    def close(self) -> None:
        """Drop what has not begun, write out what is queued, let go of vLLM's memory; idempotent.

        Takes at most ``drain_timeout`` and about 5 s.

        Raises:
            TimeoutError: A transfer still runs: vLLM's memory must not be unmapped.
        """
        if not self._open:
            return
        self._open = False
        self._askers.shutdown(wait=False, cancel_futures=True)
        idle = self.transfers.close(self._options.drain_timeout)
        self.cache.close()
        if not idle and not self.transfers.wait(0.0):
            raise TimeoutError(
                f"a transfer still ran {self._options.drain_timeout} s after the shutdown began; "
                "vLLM's CPU cache is left mapped"
            )
        self._rows.close()

"""The scheduler's half of the connector: what to load and what to save, step by step, without vLLM."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore_vllm.connector_loading import AsyncLoads, Evict, StepLoads
from kvstore_vllm.connector_lookup import Question, ShardLookups
from kvstore_vllm.connector_meta import BlockRun, StepPlan, Tally

# Nothing is computed meanwhile, so a step may sleep a moment instead of asking again at once.
_IDLE_WAIT_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How the scheduler's half behaves.

    Attributes:
        block_tokens: Tokens per block, and per block hash.
        loads: Whether blocks are loaded (``kv_role`` consumer or both).
        saves: Whether blocks are saved (``kv_role`` producer or both).
        layerwise: Load while the request's first step runs, instead of before it.
        verified_tail_tokens: Tokens that must be verified behind a block before it is saved: 1 with
            speculative decoding, whose drafter is one token behind.
        lookup_wait_s: How long an answer may be waited for.
        lookup_ttl_s: How long an answer is believed before it is used.
        salt: Isolates a tenant.
        on_reset: ``"clear"``, ``"part"`` or ``"keep"``.
    """

    block_tokens: int
    loads: bool = True
    saves: bool = True
    layerwise: bool = False
    verified_tail_tokens: int = 0
    lookup_wait_s: float = 0.0
    lookup_ttl_s: float = 1.0
    salt: str | None = None
    on_reset: str = "clear"


@dataclass(slots=True)
class _Track:
    """One request from its arrival to its end.

    ``request`` is vLLM's own object: its hashes grow with every verified token.
    """

    request: Any
    question: Question | None = None
    asked_again: bool = False
    load_start: int = 0
    may_load: bool = True
    block_ids: list[int] = field(default_factory=list)
    next_save: int = -1
    hashes_sent: int = 0


class SchedulerHalf:
    """Decides what workers load and save; called by the scheduler's thread alone.

    Nothing here waits for a medium, unless ``lookup_wait_s`` allows it.

    *Which blocks are saved.* Only blocks that vLLM has hashed: a hash exists once all tokens of its block
    are verified (sampled and accepted), so that rejected drafts never count.  They are saved at the end of
    the first step that has computed them in full, while their pages are still the request's.  When
    ``num_computed_tokens`` goes back (failed load, preemption), saving goes back with it.

    *A step that loads layerwise saves nothing*: whether the load was good on every rank is known only
    when the step has ended, and what was computed from a bad block must not be stored.  The next step
    makes up for it.

    *A request whose load failed is never loaded again*: the store may still say that it has the block.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._lookups: ShardLookups | None = None
        self._tracks: dict[str, _Track] = {}
        self._pending: list[BlockRun] = []
        self._async_loads = AsyncLoads()
        self._step_loads = StepLoads()
        self._resets = 0
        self._salt = settings.salt
        self.tally = Tally()

    def use(self, lookups: ShardLookups) -> None:
        """From now on there is something to look blocks up in."""
        self._lookups = lookups

    def can_evict(self, evict: Evict) -> None:
        """From now on blocks can be taken out of vLLM's prefix cache, which layerwise loads need."""
        self._step_loads.evict = evict

    @property
    def layerwise(self) -> bool:
        """Whether a load happens while the step runs that needs it."""
        return self._settings.layerwise and self._step_loads.evict is not None

    # -- one request

    def arrived(self, request: Any) -> None:
        """A new request: start looking before it is its turn."""
        track = self._track(request)
        if self._lookups is not None and self._settings.loads and track.question is None:
            wanted = self._wanted(request)
            if wanted:
                self.tally.add("lookups")
                track.question = self._lookups.ask(wanted, 0, self._salt)

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones can be loaded, and whether before the request runs.

        At least one token of the request is left to compute.  None: ask again, the answer is on its way.
        """
        track = self._track(request)
        start = num_computed_tokens // self._settings.block_tokens
        if self._step_loads.shares(request.block_hashes[:start]):
            return None, False
        if self._lookups is None or not self._settings.loads or not track.may_load:
            return 0, False
        wanted = self._wanted(request)
        if len(wanted) <= start:
            return 0, False
        end = self._answer(track, wanted, start)
        if end is None:
            return None, False
        n_blocks = min(end, len(wanted)) - start
        if n_blocks <= 0:
            return 0, False
        track.load_start = start
        return n_blocks * self._settings.block_tokens, not self.layerwise

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request has pages; those of the external tokens are to be loaded."""
        track = self._track(request)
        n_blocks = num_external_tokens // self._settings.block_tokens
        if n_blocks:
            start, end = track.load_start, track.load_start + n_blocks
            hashes = tuple(request.block_hashes[:end])
            run = BlockRun(request.request_id, tuple(block_ids[start:end]), start, hashes)
            self._pending.append(run)
            if self.layerwise:
                self._step_loads.add(request.request_id, hashes[start:], block_ids[start:])
            else:
                self._async_loads.add(request.request_id, run.block_ids)
            track.next_save = -1  # what is loaded need not be saved
            self.tally.add("hit_blocks", n_blocks)
        if not n_blocks and request.request_id in self._async_loads:
            return  # called for the second time, when an asynchronous load is under way or over
        track.question = None
        track.asked_again = False

    def ended(self, request_id: str) -> None:
        """A request has finished or was aborted; nothing more is planned for it.

        A load that was begun stays planned: vLLM keeps its pages until the workers say that it is over.
        """
        self._tracks.pop(request_id, None)
        self._async_loads.ended((request_id,))

    # -- one step

    def plan(self, output: Any) -> StepPlan:
        """What the workers do in the step that vLLM has just scheduled.

        Args:
            output: vLLM's ``SchedulerOutput``; only read.
        """
        loads, self._pending = tuple(self._pending), []
        layerwise = bool(loads) and self.layerwise
        self._step_loads.step()
        idle = not output.total_num_scheduled_tokens
        saves = self._saves(output, save=self._settings.saves and not layerwise)
        if idle and not loads and self._lookups is not None:
            self._lookups.wait(_IDLE_WAIT_S)
        return StepPlan(
            loads=loads,
            saves=tuple(saves),
            layerwise=layerwise,
            resets=self._resets,
            clears=self._settings.on_reset == "clear",
            salt=self._salt,
            idle=idle,
            tokens=output.total_num_scheduled_tokens,
            context_tokens=_context_tokens(output),
        )

    def loads_failed(self, block_ids: Collection[int]) -> None:
        """Pages that a worker could not fill; vLLM computes them."""
        for request_id in (*self._step_loads.failed(block_ids), *self._async_loads.failed(block_ids)):
            track = self._tracks.get(request_id)
            if track is not None:
                track.may_load = False

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """Asynchronous loads that are over on every rank."""
        self._async_loads.ended(request_ids)

    def reset(self) -> None:
        """Make what was stored before unreachable, unless it is to be kept: vLLM empties its caches.

        Blocks that could not be cleared may be of other weights, so the engine never asks for them
        again: it goes on under a salt of its own.  The workers follow with the next step.
        """
        if self._settings.on_reset == "keep":
            return
        cleared = self._settings.on_reset == "clear" and self._lookups is not None and self._lookups.clear()
        if not cleared:
            own = uuid.uuid4().hex
            self._salt = own if self._salt is None else f"{self._salt}\n{own}"
        self._resets += 1
        for track in self._tracks.values():
            track.question = None
            track.hashes_sent = 0

    @property
    def n_requests(self) -> int:
        """Requests that are known."""
        return len(self._tracks)

    @property
    def n_loads(self) -> int:
        """Loads that are planned or under way."""
        return len(self._pending) + len(self._async_loads)

    # -- inner matters

    def _track(self, request: Any) -> _Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            track = self._tracks[request.request_id] = _Track(request)
        return track

    def _wanted(self, request: Any) -> list[bytes]:
        """Hashes of the blocks that may be loaded: logits need one computed token at least."""
        hashes: list[bytes] = request.block_hashes[: (request.num_tokens - 1) // self._settings.block_tokens]
        return hashes

    def _answer(self, track: _Track, wanted: Sequence[bytes], start: int) -> int | None:
        """The end of the run of blocks that are there, or None while that is being found out."""
        lookups, question = self._lookups, track.question
        if lookups is None:
            return start
        if question is None or not question.start <= start <= max(question.end, question.start):
            # Also when more is computed than was found: the store may lack the head and have the rest.
            self.tally.add("lookups")
            question = track.question = lookups.ask(wanted, start, self._salt)
        if not question.answered.wait(self._settings.lookup_wait_s):
            return None
        old = time.monotonic() - question.answered_at > self._settings.lookup_ttl_s
        if old and not track.asked_again:
            track.asked_again = True
            self.tally.add("lookups")
            track.question = lookups.ask(wanted, start, self._salt)
            return None
        return question.end

    def _saves(self, output: Any, *, save: bool) -> list[BlockRun]:
        """Follow every scheduled request's pages, and collect what is computed in full by this step."""
        runs = []
        for new in output.scheduled_new_reqs:
            track = self._tracks.get(new.req_id)
            if track is None:
                continue
            track.block_ids = list(new.block_ids[0])
            runs.append(self._computed(track, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id], save))
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            track = self._tracks.get(request_id)
            if track is None:
                continue
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                track.block_ids = list(new_ids[0]) if new_ids else []
            elif new_ids is not None:
                track.block_ids += new_ids[0]
            n_scheduled = output.num_scheduled_tokens[request_id]
            runs.append(self._computed(track, cached.num_computed_tokens[i], n_scheduled, save))
        return [run for run in runs if run is not None]

    def _computed(self, track: _Track, n_computed: int, n_scheduled: int, save: bool) -> BlockRun | None:
        """The blocks of a request that this step completes and that were not saved yet."""
        block_tokens = self._settings.block_tokens
        before = n_computed // block_tokens
        start = before if track.next_save < 0 else min(track.next_save, before)
        track.next_save = start
        if not save:
            return None
        request = track.request
        verified = (request.num_tokens - self._settings.verified_tail_tokens) // block_tokens
        end = min((n_computed + n_scheduled) // block_tokens, verified, len(request.block_hashes), len(track.block_ids))
        if end <= start:
            return None
        track.next_save = end
        first_hash = track.hashes_sent if 0 < track.hashes_sent <= start else 0
        track.hashes_sent = end
        hashes = tuple(request.block_hashes[first_hash:end])
        return BlockRun(request.request_id, tuple(track.block_ids[start:end]), start, hashes, first_hash)


def _context_tokens(output: Any) -> int:
    """Tokens before those that a step computes, on the average of the computed tokens."""
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    scheduled: dict[str, int] = output.num_scheduled_tokens
    weighted: int = sum(n * before.get(request_id, 0) for request_id, n in scheduled.items())
    return weighted // max(1, sum(scheduled.values()))

"""Agreement of the ranks of a tensor-parallel group on numbers, in bounded time."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from kvstore.errors import BackendUnavailableError, ConfigError, DeadlineError, KVStoreError
from kvstore.stats import GroupCounters, TierHealth

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ProcessGroupGloo
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("kvstore.group")

LOCAL_SHARE: Final = 0.6
"""Of a call's deadline, for a rank's own work: it then has an answer, whatever its tiers do."""
_MEET_SHARE: Final = 0.85  # until when it waits for the others: they may begin 0.25 deadlines later
_CONFIRM_SHARE: Final = 0.95  # who has met is at most a message apart from the others
_LEAST_S: Final = 0.02  # for a round that begins late: others may be in it and owe nothing but the answer
_SETTLE_S: Final = 1.0  # for the store, once in a group's life: it answers in a millisecond unless its host is gone
_OPEN_S: Final = 60.0  # ranks load models and open tiers at their own pace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clock:
    """When the parts of one call end, on the monotonic clock.

    Attributes:
        local: A rank's own work.
        meet: Waiting for what the others found.
        confirm: Waiting for the others to have it, too.
        end: The call.
    """

    local: float
    meet: float
    confirm: float
    end: float

    @classmethod
    def start(cls, deadline_s: float, began: float | None = None) -> Self:
        """Cut the time of a call that began now, or at ``began``, into its parts."""
        now = time.monotonic() if began is None else began
        return cls(*(now + share * deadline_s for share in (LOCAL_SHARE, _MEET_SHARE, _CONFIRM_SHARE, 1.0)))


def question(call: str, parts: Sequence[bytes] = ()) -> int:
    """63 bits that stand for what a rank asks: equal for equal questions only, but for one case in 2**63."""
    h = hashlib.blake2b(call.encode(), digest_size=8)
    for part in parts:
        h.update(part)
    return int.from_bytes(h.digest(), "little") >> 1


class Agreement:
    """Ranks that answer alike: each number that they agree on is the least that any of them has.

    All ranks ask the same questions in the same order.  A question costs a round among them, and a
    second one when the answer is not "nothing"; ranks that ask different things agree on nothing.
    A round that does not end in time breaks the group for good: its answer, and every later one, is
    nothing.  A question ends within its deadline, the one that breaks the group a second later at worst.
    Thread-safe, but two threads ask in an order that other ranks need not share.

    No two ranks ever answer differently.  A rank that has seen the outcome of the first round knows
    that every rank has given its number; when all have confirmed that, the outcome stands.  A rank
    that misses a confirmation (or the first round) looks in the group's store, where the first of
    them has settled the question: with the outcome if it knew it, which all who confirmed took, or with
    nothing, which is possible only before anybody could confirm.

    The ranks talk over sockets of their own (gloo), also when the group is NCCL's: the engine's
    collectives keep their order, nothing waits for a device, and no watchdog ends the process.

    Args:
        store: What the ranks share besides sockets, under a prefix of their own.
        rank: Number of this rank.
        size: Number of ranks, at least 2.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.size = size
        self.chunk_blocks = 1
        """Blocks that one question is about at most, the same on every rank; set when the cache opens."""
        self._store = store
        self._lock = threading.Lock()
        self._links: ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=_OPEN_S))
        self._rounds = 0
        self._counters = GroupCounters(size=size, rank=rank)
        self._reason = ""
        self._differed = False

    @classmethod
    def join(cls, group: ProcessGroup) -> Self | None:
        """Take part in the agreement of a group's ranks; None for a group of one.

        Every rank of the group calls it, in the same order among its calls.

        Raises:
            ConfigError: ``group`` is not an initialised group that this process belongs to.
            DeadlineError: The others did not come within a minute, or cannot be reached.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        if not isinstance(group, dist.ProcessGroup):
            msg = (
                f"group is {group!r}; expected a torch.distributed ProcessGroup that this process belongs to, "
                "such as torch.distributed.group.WORLD, or None"
            )
            raise ConfigError(msg)
        if group.size() == 1:
            return None
        if not dist.is_gloo_available():
            msg = "group needs a torch that is built with gloo, which connects the ranks; open the cache without group"
            raise ConfigError(msg)
        shared = group.get_group_store()
        # how often this rank has joined: the same on all of them, and their names must not meet older ones
        number = shared.add(f"kvstore/joined/{group.rank()}", 1)
        try:
            return cls(PrefixStore(f"kvstore/{number}", shared), group.rank(), group.size())
        except RuntimeError as e:
            msg = (
                f"rank {group.rank()} could not be connected with the other ranks of its group: {_first_line(e)}; "
                "every rank opens its cache at about the same time (GLOO_SOCKET_IFNAME names the network interface)"
            )
            raise DeadlineError(msg) from e

    # -- opening

    def together(self, same: str, chunk_blocks: int, make: Callable[[], T]) -> T:
        """Make something on every rank, or nowhere.

        Args:
            same: What must be equal on all ranks, as text.
            chunk_blocks: The most blocks that a question of this rank may be about.
            make: Makes it; runs before the ranks meet.

        Raises:
            ConfigError: ``same`` differs between the ranks.
            BackendUnavailableError: It failed on another rank.
            DeadlineError: Another rank did not come within a minute.
        """
        try:
            made = make()
        except BaseException:
            self.agree(question(same), [0], Clock.start(_OPEN_S))
            self.close()
            raise
        try:
            self.chunk_blocks = self._opened(same, chunk_blocks)
        except KVStoreError:
            getattr(made, "close", lambda: None)()
            self.close()
            raise
        return made

    def _opened(self, same: str, chunk_blocks: int) -> int:
        (agreed,) = self.agree(question(same), [chunk_blocks], Clock.start(_OPEN_S))
        if agreed:
            return agreed
        if self._reason:
            msg = f"the {self.size} ranks of the group did not all open their caches: {self._reason}"
            raise DeadlineError(msg)
        if self._differed:
            msg = f"the ranks of the group opened caches that do not belong together; rank {self.rank} opened {same}"
            raise ConfigError(msg)
        msg = "another rank of the group could not open its cache; its own error says why"
        raise BackendUnavailableError(msg)

    # -- questions

    @property
    def broken(self) -> bool:
        """Whether every answer is nothing from now on."""
        return bool(self._reason)

    def agree(self, asked: int, values: Sequence[int], clock: Clock, nothing: Sequence[int] = ()) -> list[int]:
        """Return, for each of ``values``, the least that any rank gave.

        Args:
            asked: The :func:`question`, which every rank must ask.
            values: What this rank found.
            clock: When the parts of the call end.
            nothing: The answer when there is no agreement; no value is less. Zeros by default.
        """
        zero = list(nothing) or [0] * len(values)
        if not self._lock.acquire(timeout=max(_LEAST_S, clock.confirm - time.monotonic())):
            self._break("another thread of this rank was still waiting for the others")
            return zero
        try:
            return zero if self._links is None else self._ask(asked, list(values), clock, zero)
        except BaseException:  # KeyboardInterrupt: where the others are in this round is unknown
            self._break("a question was interrupted")
            raise
        finally:
            self._lock.release()

    def trimmed(self, n_blocks: int) -> None:
        """Count blocks that this rank had and another one lacked."""
        self._counters.trimmed_blocks += n_blocks

    def _ask(self, asked: int, values: list[int], clock: Clock, zero: list[int]) -> list[int]:
        self._rounds += 1
        try:
            *agreed, low, high = self._least([*values, asked, -asked], clock.meet)
        except RuntimeError as e:
            return self._settle(e, None, clock) or zero
        self._differed = low != -high
        if self._differed:
            self._counters.mismatches += 1
            return zero
        if agreed != zero:
            try:
                self._least([self._rounds], clock.confirm)
            except RuntimeError as e:
                return self._settle(e, agreed, clock) or zero
        self._counters.agreements += 1
        return agreed

    def _least(self, values: Sequence[int], until: float) -> list[int]:
        """One round; raises RuntimeError when it does not end in time or a rank is gone."""
        import torch
        import torch.distributed as dist

        if self._links is None:
            msg = "the links are closed"
            raise RuntimeError(msg)
        patience = timedelta(seconds=max(_LEAST_S, until - time.monotonic()))
        tensor = torch.tensor(values, dtype=torch.int64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.timeout = patience
        links: Any = self._links
        links.allreduce([tensor], options).wait(patience)
        least: list[int] = tensor.tolist()
        return least

    # -- when a round fails

    def _settle(self, error: RuntimeError, agreed: list[int] | None, clock: Clock) -> list[int] | None:
        """Take the answer that the first rank without one has written down; None is nothing."""
        proposal = json.dumps(agreed)
        found: list[list[int] | None] = []
        store, links, name = self._store, self._links, f"settled/{self._rounds}"
        self._break(f"rank {self.rank} waited in vain: {_first_line(error)}")

        def look() -> None:
            nonlocal links
            try:
                found.append(json.loads(store.compare_set(name, "", proposal)))
            except (RuntimeError, ValueError) as e:
                logger.debug("the group's store did not answer: %s", e)
            links = None  # the last reference: sockets close, so that the others need not wait

        thread = threading.Thread(target=look, name="kvstore-group", daemon=True)
        thread.start()
        thread.join(max(_SETTLE_S, clock.end - time.monotonic()))
        return found[0] if found else None

    def _break(self, reason: str) -> None:
        self._links = None
        if not self._reason:
            self._reason = reason
            self._counters.failures += 1
            logger.warning(
                "the ranks of the group no longer agree, so every read is a miss from now on (%s); "
                "close the caches of all ranks and open them again",
                reason,
            )

    # -- state

    @property
    def counters(self) -> GroupCounters:
        """What happened so far."""
        return replace(self._counters)

    @property
    def health(self) -> TierHealth:
        """State of the agreement."""
        if self._reason:
            return TierHealth("down", self._reason)
        if self._differed:
            return TierHealth("degraded", "the ranks asked different things at their last question")
        return TierHealth("ok")

    def forked(self) -> None:
        """In a forked child: it is no rank, and must not touch what the parent talks over."""
        if self._links is not None:  # its destructor would wait for threads that the child does not have
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._links))
        self._lock = threading.Lock()
        self._counters = GroupCounters(size=self.size, rank=self.rank)
        self._links = None
        self._reason = "this process was forked from a rank and is none itself"

    def close(self) -> None:
        """Leave; the others notice at their next question. Idempotent."""
        self._reason = self._reason or "the cache of this rank is closed"
        self._links = None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]

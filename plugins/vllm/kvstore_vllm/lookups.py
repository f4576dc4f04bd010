"""Answers to lookups, remembered so that vLLM's scheduler never waits for a medium."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

# Answers in memory, about 250 bytes each; more keys than a scheduler has in its waiting queue.
_LIMIT: Final = 1 << 16
# For what was not really asked: behind the first absent block, or when a tier could not be asked.
GUESS_S: Final = 1.0
# A key whose load failed stays a miss at least so long, or the scheduler would promote it forever.
_FAILED_S: Final = 30.0


class Answer(NamedTuple):
    """What is known about a key, until when."""

    present: bool
    until: float


@dataclass(slots=True)
class LookupCounters:
    """What lookups came to; only grows."""

    remembered: int = 0
    asked: int = 0
    gave_up: int = 0


class Lookups:
    """Remembered answers and the questions that are under way.

    :meth:`find`, :meth:`take` and the other methods of the scheduler are called by one thread at a
    time; :meth:`answered`, :meth:`stored` and :meth:`removed` by any thread.  Nothing here waits.

    Other processes write and evict too, so every answer is believed for a time only.  What this
    process stores, sees removed or fails to load counts at once, also against an answer that is
    still under way.

    Args:
        ttl_s: Seconds for which an answer is believed.
        wait_s: Seconds after which a question without an answer counts as a miss.
        limit: Answers kept; the oldest are forgotten first.
        clock: Monotonic seconds.
    """

    def __init__(
        self, *, ttl_s: float, wait_s: float, limit: int = _LIMIT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = LookupCounters()
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._limit = limit
        self._clock = clock
        self._answers: dict[bytes, Answer] = {}
        self._asked: dict[bytes, float] = {}
        self._batch: list[tuple[bytes, Any]] = []
        # (key, present, believed for so many seconds, answers a question); appended by any thread.
        self._news: deque[list[tuple[bytes, bool, float, bool]]] = deque()

    # -- the scheduler

    def find(self, key: bytes, context: Any) -> bool | None:
        """Say whether a block is there; None when that is being found out."""
        if self._news:
            self._apply()
        answer = self._answers.get(key)
        if answer is not None and answer.until > self._clock():
            self.counters.remembered += 1
            return answer.present
        asked_at = self._asked.get(key)
        if asked_at is None:
            if len(self._asked) >= self._limit:
                self.counters.gave_up += 1
                return False
            self.counters.asked += 1
            self._asked[key] = self._clock()
            self._batch.append((key, context))
            return None
        if self._clock() - asked_at > self._wait_s:
            self.counters.gave_up += 1
            return False
        return None

    def known_present(self, key: bytes) -> bool:
        """Whether a block is known to be there, so that it need not be stored."""
        answer = self._answers.get(key)
        return answer is not None and answer.present and answer.until > self._clock()

    def take(self) -> list[tuple[bytes, Any]]:
        """The questions since the last call, with their request's context; to be asked off this thread."""
        batch, self._batch = self._batch, []
        return batch

    @property
    def waiting(self) -> bool:
        """Whether a question is under way, or an answer has arrived that nobody has seen."""
        if self._news:
            self._apply()
        return bool(self._asked)

    def failed(self, keys: Iterable[bytes]) -> None:
        """Note blocks that could not be loaded: misses from now on, until they are stored again."""
        self._apply()
        until = self._clock() + max(self._ttl_s, _FAILED_S)
        for key in keys:
            self._asked.pop(key, None)
            self._remember(key, Answer(present=False, until=until))

    def clear(self) -> None:
        """Forget everything; answers that are under way come too late."""
        self._news.clear()
        self._answers.clear()
        self._asked.clear()
        self._batch.clear()

    # -- any thread

    def answered(self, keys: Sequence[bytes], present: Sequence[bool], *, guessed: Sequence[bool]) -> None:
        """Answer questions; a guess is believed for a second only."""
        self._news.append([
            (key, there, min(self._ttl_s, GUESS_S) if guess else self._ttl_s, True)
            for key, there, guess in zip(keys, present, guessed, strict=True)
        ])  # fmt: skip

    def accepted(self, keys: Iterable[bytes]) -> None:
        """Note blocks that are on their way to a medium: what is known about them is out of date."""
        self._news.append([(key, False, 0.0, False) for key in keys])

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note blocks that have reached a medium."""
        self._news.append([(key, True, self._ttl_s, False) for key in keys])

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note blocks that have left every medium."""
        self._news.append([(key, False, self._ttl_s, False) for key in keys])

    def _apply(self) -> None:
        while self._news:
            news = self._news.popleft()
            now = self._clock()
            for key, present, ttl_s, is_answer in news:
                # An answer to a question that was settled meanwhile is older than what settled it.
                if self._asked.pop(key, None) is None and is_answer:
                    continue
                self._remember(key, Answer(present, now + ttl_s))

    def _remember(self, key: bytes, answer: Answer) -> None:
        self._answers.pop(key, None)  # so that the newest stand last
        self._answers[key] = answer
        while len(self._answers) > self._limit:
            del self._answers[next(iter(self._answers))]

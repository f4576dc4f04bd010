"""Hundreds of requests on one engine over a medium that fails at random; some are aborted under way."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.engines.vllm.connector_child import sampling, scheduler_of

MAX_TOKENS: Final = 24
_AT_ONCE: Final = 14
_LIMIT_S: Final = 240.0


@dataclass
class Outcome:
    """What came of it."""

    right: int = 0
    wrong: list[Any] = field(default_factory=list)
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    hang: list[str] = field(default_factory=list)


class Storm:
    """Keeps requests coming and compares every answer with that of a calm engine.

    Args:
        llm: The engine, in this process.
        rng: Decides who asks, who gives up and when the engine forgets its cache.
        prompts: What is asked.
        truth: The right answers.
    """

    def __init__(
        self, llm: Any, rng: random.Random, prompts: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]
    ) -> None:
        self.outcome = Outcome()
        self._llm = llm
        self._engine = llm.llm_engine
        self._scheduler = scheduler_of(llm)
        self._rng = rng
        self._prompts = prompts
        self._truth = truth
        self._wanted: dict[str, int] = {}
        self._seen: dict[str, list[int]] = {}

    def run(self, n_requests: int) -> Outcome:
        """Answer or abort them all."""
        numbers = iter(range(n_requests))
        end_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < end_s:
            while len(self._wanted) < _AT_ONCE and (number := next(numbers, None)) is not None:
                self._ask(str(number))
            if not self._wanted and not self._engine.has_unfinished_requests():
                return self.outcome
            if self._rng.random() < 0.01:
                self._llm.reset_prefix_cache()
            self._step()
            if self._wanted and self._rng.random() < 0.05:
                self._abort(self._rng.choice(sorted(self._wanted)))
        self.outcome.hang = sorted(self._wanted) or ["an aborted request"]
        return self.outcome

    def _ask(self, request_id: str) -> None:
        which = self._wanted[request_id] = self._rng.randrange(len(self._prompts))
        self._engine.add_request(request_id, {"prompt_token_ids": list(self._prompts[which])}, sampling(MAX_TOKENS))

    def _step(self) -> None:
        before = {r.request_id: r.num_preemptions for r in self._scheduler.requests.values()}
        for output in self._engine.step():
            self._seen[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self._judge(output.request_id, whole=True)
        after = self._scheduler.requests.values()
        self.outcome.preemptions += sum(r.num_preemptions - before.get(r.request_id, 0) for r in after)
        self.outcome.steps += 1

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])
        self._judge(request_id, whole=False)
        self.outcome.aborted += 1

    def _judge(self, request_id: str, *, whole: bool) -> None:
        which, tokens = self._wanted.pop(request_id), self._seen.get(request_id, [])
        truth = list(self._truth[which])
        if tokens != (truth if whole else truth[: len(tokens)]):
            self.outcome.wrong.append([which, tokens])
        elif whole:
            self.outcome.right += 1


def use_flaky_medium(rng: random.Random) -> None:
    """Let the backend name ``flaky`` stand for memory that fails, is slow for a moment and damages."""
    from kvstore.memory_backend import MemoryBackend
    from kvstore.plugins import Registry
    from kvstore.testing.doubles import TornBackend
    from kvstore.testing.registering import register_backend

    chances = {"get_many": 0.15, "exists_many": 0.05, "put_many": 0.1}

    class Flaky(TornBackend):
        def around(self, operation: str, work: Any) -> Any:
            if rng.random() < chances.get(operation, 0):
                msg = f"{operation} fails at random"
                raise OSError(msg)
            if rng.random() < 0.05:
                time.sleep(0.02)
            return super().around(operation, work)

    def tear(data: bytes) -> bytes:
        if rng.random() >= 0.05:
            return data
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    registry, _ = register_backend(lambda: Flaky(MemoryBackend(), tear), name="flaky")
    Registry.discover = classmethod(lambda cls, **_: registry)  # type: ignore[method-assign,assignment]

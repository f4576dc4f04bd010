"""How long the model takes to compute a step's tokens, seen from one worker."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

# Steps of fewer tokens wait for weights and launches rather than compute.
LEAST_TOKENS: Final = 256
# Steps whose end the device has not reported yet; more than an engine has under way.
_PENDING: Final = 8


class Prefill(NamedTuple):
    """One step: its tokens, the tokens before them, and the seconds it took."""

    tokens: int
    context_tokens: int
    seconds: float


@dataclass(slots=True)
class _Step:
    tokens: int
    context_tokens: int
    began_s: float
    began: torch.Event | None = None
    ended: torch.Event | None = None


class PrefillTimer:
    """Times forward passes; on an accelerator by events, which nobody waits for.

    Called by the engine's thread alone.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type != "cpu"
        self._step: _Step | None = None
        self._running: deque[_Step] = deque(maxlen=_PENDING)
        self._over: list[Prefill] = []

    def begin(self, tokens: int, context_tokens: int) -> None:
        """A forward pass over so many tokens begins; small ones are not timed."""
        self._step = None
        if tokens >= LEAST_TOKENS:
            self._step = _Step(tokens, context_tokens, time.perf_counter(), self._mark())

    def end(self) -> None:
        """The forward pass was computed, or on an accelerator, was launched."""
        step, self._step = self._step, None
        if step is None:
            return
        if self._on_device:
            step.ended = self._mark()
            self._running.append(step)
        else:
            self._over.append(Prefill(step.tokens, step.context_tokens, time.perf_counter() - step.began_s))

    def take(self) -> list[Prefill]:
        """The passes that have ended since the last call."""
        while self._running and (ended := self._running[0].ended) is not None and ended.query():
            step = self._running.popleft()
            if step.began is not None:
                seconds = step.began.elapsed_time(ended) / 1e3
                self._over.append(Prefill(step.tokens, step.context_tokens, seconds))
        over, self._over = self._over, []
        return over

    def _mark(self) -> torch.Event | None:
        if not self._on_device:
            return None
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

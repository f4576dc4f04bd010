"""How long an engine takes to compute a prompt, as configured or as it was seen to."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvstore.fitting import straight_line

_PREFILLS: Final = 8  # the newest, as of the tiers' reads
_ENOUGH: Final = 3  # the first one of a process is slow: of three, the middle one is none of a kind
_SHARE: Final = 4  # a prefill of less than this part of the largest one says more about its launch than its speed
_MOST_CONTEXT: Final = 1 << 40  # tokens; nothing is computed behind more


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One forward pass over some tokens of a prompt.

    Attributes:
        span: Twice the tokens before them, plus themselves: what the attention of a token costs grows
            with the tokens before it, which are ``span / 2`` on average.
        token_s: Seconds for each token.
        tokens: How many.
    """

    span: float
    token_s: float
    tokens: int


class PrefillSpeed:
    """The time to compute tokens: ``tokens * (token_s + span * slope)``; thread-safe.

    ``slope`` is 0 until prefills of different lengths were seen, which says that attention costs nothing:
    so lengths far beyond those that were seen look cheaper to compute than they are.

    Args:
        tokens_per_s: The configured speed; 0 to learn it.
    """

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self._learns = not tokens_per_s
        self._lock = threading.Lock()
        self._seen: deque[_Prefill] = deque(maxlen=_PREFILLS)
        self._line: tuple[float, float] | None = (1.0 / tokens_per_s, 0.0) if tokens_per_s else None

    def note(self, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """A prefill of so many tokens, behind so many others, took so long; what makes no sense is ignored."""
        if not self._learns or tokens <= 0 or not 0.0 < seconds < float("inf"):
            return
        span = 2 * min(max(0, context_tokens), _MOST_CONTEXT) + tokens
        with self._lock:
            self._seen.append(_Prefill(span, seconds / tokens, tokens))
            if len(self._seen) >= _ENOUGH:
                self._line = self._fit()

    def _fit(self) -> tuple[float, float]:
        largest = max(prefill.tokens for prefill in self._seen)
        points = [(p.span, p.token_s) for p in self._seen if _SHARE * p.tokens >= largest]
        return straight_line(points) or (median(token_s for _, token_s in points), 0.0)

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return self._line is not None

    def seconds(self, tokens: int, context_tokens: int = 0) -> float:
        """Time to compute ``tokens`` behind ``context_tokens``; infinite while nothing is known."""
        line = self._line
        if line is None:
            return float("inf")
        token_s, slope = line
        return tokens * (token_s + slope * (2 * context_tokens + tokens))

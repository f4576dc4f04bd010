"""How long reads of one tier take, learned from the reads themselves."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvstore.fitting import straight_line

_READS: Final = 8  # the newest: a medium that has changed its speed is believed after five
_ENOUGH: Final = 4  # one outlier among them does no harm
_FIT_S: Final = 0.01  # reads that are worth judging take longer; a fit takes 20 us
_DEADBAND: Final = 1 / 8  # a new fit that is no further from the one in use is noise


@dataclass(frozen=True, slots=True)
class LoadTime:
    """What a read of one tier takes.

    Attributes:
        latency_s: Seconds until the first block, whatever comes after it.
        block_s: Seconds for each block.
        most_blocks: Beyond so many nothing is known, and nothing is added: finite when all reads were of
            about the same size, so that latency and time per block cannot be told apart.
    """

    latency_s: float
    block_s: float
    most_blocks: float = math.inf

    def seconds(self, n_blocks: int) -> float:
        """Time of a read of ``n_blocks``; at least so long, where ``most_blocks`` is finite."""
        return self.latency_s + self.block_s * min(n_blocks, self.most_blocks)

    def bytes_per_s(self, block_bytes: int) -> float:
        """Bandwidth behind the latency; 0 when more blocks took no more time."""
        return block_bytes / self.block_s if self.block_s else 0.0

    def near(self, other: LoadTime, sizes: Sequence[int]) -> bool:
        """Whether both say about the same of reads of these sizes, with the same knowledge."""
        if math.isinf(self.most_blocks) != math.isinf(other.most_blocks):
            return False
        return all(abs(self.seconds(n) - other.seconds(n)) <= _DEADBAND * other.seconds(n) for n in sizes)


def load_time(reads: Sequence[tuple[int, float]]) -> LoadTime:
    """Fit reads, given as pairs of blocks and seconds.

    Where the sizes do not tell latency from time per block, the best is assumed of every size that was
    not measured: that a smaller read takes its share only, and a larger one no longer.  So a tier is not
    given up for what nobody has measured, and reading from it measures.
    """
    line = straight_line(reads)
    if line is not None:
        return LoadTime(*line)
    n_blocks = median(n for n, _ in reads)
    return LoadTime(0.0, median(seconds for _, seconds in reads) / n_blocks, n_blocks)


class LoadTimes:
    """The newest reads of one tier, and what they say; thread-safe.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: deque[tuple[int, float]] = deque(maxlen=_READS)
        self._changed = False
        self._fit_at = -math.inf
        self._known: LoadTime | None = None

    def note(self, n_blocks: int, seconds: float) -> None:
        """A read has delivered ``n_blocks``, at least 1; or it failed, and ``seconds`` is what it may take at most."""
        with self._lock:
            self._reads.append((n_blocks, seconds))
            self._changed = True

    @property
    def known(self) -> LoadTime | None:
        """What a read takes, None before four of them.

        Stays the same while the reads stay within an eighth of it; fitted anew 100 times a second at most.
        """
        if not self._changed:
            return self._known
        with self._lock:
            now = self._clock()
            if len(self._reads) >= _ENOUGH and now - self._fit_at >= _FIT_S:
                self._changed, self._fit_at = False, now
                fitted, sizes = load_time(self._reads), [n for n, _ in self._reads]
                if self._known is None or not fitted.near(self._known, (min(sizes), max(sizes))):
                    self._known = fitted
            return self._known

    @property
    def largest_blocks(self) -> int:
        """Blocks of the largest of the newest reads, 0 before the first."""
        with self._lock:
            return max((n for n, _ in self._reads), default=0)

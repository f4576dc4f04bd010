"""Load or recompute: whether reading blocks from a tier is faster than computing them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.l2.promises import Promises
from kvstore.l2.sounding import sound
from kvstore.prefill_speed import PrefillSpeed

if TYPE_CHECKING:
    from kvstore.config import GateConfig
    from kvstore.keys import KVCacheKey
    from kvstore.l2.reader import TierReader

PROBE_S: Final = 5.0
"""A declined tier is measured again so often, while somebody wants something of it: two rounds of three reads
outvote five slow ones, so it is back within about 10 s."""
_TOLD_BLOCKS: Final = 1 << 14  # contains_each tells of every block; about 2 MiB for each tier


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of loading some blocks from one tier.

    Attributes:
        declined: Whether the tier is not asked, because computing the blocks is faster.
        load_s: Seconds that loading them takes, as far as it was measured; 0 before.
        recompute_s: Seconds that computing them takes; 0 while the prefill speed is not known.
    """

    declined: bool
    load_s: float
    recompute_s: float


@dataclass(slots=True)
class _GatedTier:
    """One tier behind the gate."""

    reader: TierReader
    told: Promises = field(default_factory=lambda: Promises(limit=_TOLD_BLOCKS))
    """Blocks that somebody was told of; what stands before one in a key counts as told as well."""
    probed_at: float = float("-inf")
    probing: bool = False

    def load_s(self, n_blocks: int) -> float:
        """Seconds to load so many blocks; 0 while nothing is known."""
        known = self.reader.times.known
        return 0.0 if known is None else known.seconds(n_blocks)


class Gate:
    """Decides for each tier whether to load from it; thread-safe, and free while it has nothing to decide by.

    A tier is declined when its reads were measured, the prefill speed is known, and loading would take
    more than ``margin`` times as long as computing.  Fewer blocks of the same run are then declined too,
    and more of them perhaps not, for the latency is paid once.

    *What was told is kept.*  A tier that a lookup has counted on is not declined for that prefix for a
    minute, whatever is measured meanwhile: an engine that was told of blocks has made its plans.

    *A declined tier recovers*: while blocks of it are wanted, it is read in the background now and then.

    Args:
        config: The ``[gate]`` section.
        block_tokens: Tokens of one block.
    """

    def __init__(self, config: GateConfig, block_tokens: int) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._speed = PrefillSpeed(config.prefill_tokens_per_s)
        self._tiers: dict[str, _GatedTier] = {}
        self._probing = threading.Lock()

    def join(self, reader: TierReader) -> None:
        """A tier was opened, perhaps anew."""
        self._tiers = self._tiers | {reader.tier.name: _GatedTier(reader)}

    def note_prefill(self, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """The engine has computed ``tokens`` behind ``context_tokens`` others in ``seconds``."""
        self._speed.note(tokens, seconds, context_tokens)

    @property
    def active(self) -> bool:
        """Whether anything can be declined at all."""
        return self._config.enabled and self._speed.known

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prefill speed at the beginning of a prompt; 0 while it is not known."""
        return 1000 / self._speed.seconds(1000)

    def verdict(self, tier_name: str, n_blocks: int, depth_blocks: int = 0) -> Verdict:
        """Judge a load; changes nothing.

        Args:
            tier_name: Of the tier.
            n_blocks: How many consecutive blocks.
            depth_blocks: Blocks of the prompt before them.
        """
        gated = self._tiers.get(tier_name)
        load_s = 0.0 if gated is None else gated.load_s(n_blocks)
        recompute_s = self._recompute_s(n_blocks, depth_blocks) if self._speed.known else 0.0
        declined = self.active and n_blocks > 0 and load_s > self._config.margin * recompute_s
        return Verdict(declined, load_s, recompute_s)

    def _recompute_s(self, n_blocks: int, depth_blocks: int) -> float:
        return self._speed.seconds(n_blocks * self._block_tokens, depth_blocks * self._block_tokens)

    # -- before a tier is asked

    def admits(self, tier_name: str, key: KVCacheKey, start: int, stop: int | None = None) -> bool:
        """Whether loading ``key[start:stop]`` is worth it; what is not may be measured in the background."""
        if not self.active:
            return True
        gated, stop = self._tiers[tier_name], len(key) if stop is None else stop
        load_s = gated.load_s(stop - start)
        if load_s <= self._config.margin * self._recompute_s(stop - start, key.start_block + start):
            return True
        self._probe(gated, key, range(start, stop))
        return False

    def admits_each(self, tier_name: str, key: KVCacheKey, n_blocks: int) -> bool:
        """Whether loading ``n_blocks`` independent blocks of a key is worth it.

        They are judged as part of the largest read that was seen lately: who asks for single blocks may
        go on to read many at once.
        """
        if not self.active:
            return True
        gated = self._tiers[tier_name]
        n_blocks = max(n_blocks, gated.reader.times.largest_blocks)
        if gated.load_s(n_blocks) <= self._config.margin * self._recompute_s(n_blocks, 0):
            return True
        self._probe(gated, key, range(len(key)))
        return False

    # -- what callers were told

    def tell(self, tier_name: str, digest: bytes) -> None:
        """A lookup tells its caller that this tier has the prefix that ends with a block."""
        if self._config.enabled:  # also before the prefill speed is known: it may be by the time of the read
            self._tiers[tier_name].told.note(digest)

    def tell_each(self, tier_name: str, digests: Iterable[bytes]) -> None:
        """A caller is told that this tier has each of these blocks."""
        if self.active:
            self._tiers[tier_name].told.note_each(digests)

    def told(self, tier_name: str, key: KVCacheKey, start: int = 0) -> int:
        """The index behind the last block of ``key[start:]`` that somebody was told of; ``start`` without any."""
        return self._tiers[tier_name].told.until(key, start)

    # -- measuring again

    def _probe(self, gated: _GatedTier, key: KVCacheKey, declined: range) -> None:
        """Measure a tier by what was just declined, unless that was done a moment ago."""
        reader, now = gated.reader, time.monotonic()
        with self._probing:
            if gated.probing or now - gated.probed_at < PROBE_S:
                return
            gated.probing, gated.probed_at = True, now

        def measure() -> None:
            try:
                sound(reader, key[declined.start : declined.stop])
            finally:
                gated.probing, gated.probed_at = False, time.monotonic()

        if not reader.tier.in_background(measure, 4 * reader.tier.settings.deadline_s):
            gated.probing = False

"""Which codec a tier encodes with: the configured one, or ``auto``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.l2.gauge import Gauge
    from kvstore.l2.tier import Tier

AUTO: Final = "auto"
_USAGE_AGE_S: Final = 1.0  # how old a usage figure may be; it only steers a preference


class CodecChoice:
    """Names the codec for the next batch of a tier.

    ``auto`` is the backend's default codec.  A backend that names a ``raw_below`` fraction (its
    reads are memory copies, so compression only pays for room) stores raw until that share of
    its capacity is used.  Whether a block compresses at all is decided per block by the encoder.
    """

    def __init__(self, tier: Tier, gauge: Gauge) -> None:
        self._tier = tier
        self._gauge = gauge
        self._configured = tier.settings.config.codec
        self._checked_at = float("-inf")
        self._pressed = False

    def name(self) -> str:
        """Codec to encode the next batch with."""
        plugin = self._tier.settings.plugin
        if self._configured != AUTO:
            return self._configured
        if plugin.raw_below > 0 and not self._under_pressure(plugin.raw_below):
            return "none"
        return plugin.default_codec

    def _under_pressure(self, raw_below: float) -> bool:
        now = time.monotonic()
        if now - self._checked_at >= _USAGE_AGE_S:
            self._checked_at = now
            usage = self._gauge.usage()
            self._pressed = bool(
                usage and usage.capacity_bytes and usage.payload_bytes >= raw_below * usage.capacity_bytes
            )
        return self._pressed

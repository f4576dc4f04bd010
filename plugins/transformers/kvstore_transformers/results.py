"""What a prefill returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    """Where the time of one prefill went, in seconds.

    Attributes:
        restore_s: Key, read, verify and decode into the model's order.
        inject_s: Handing the restored K/V to the model's cache.
        compute_s: Forward passes over the tokens that were not restored.
        store_s: Copying new blocks out and queueing them, after the logits were ready.
    """

    restore_s: float
    inject_s: float
    compute_s: float
    store_s: float

    @property
    def to_logits_s(self) -> float:
        """Seconds from the call until the logits of the next token were ready."""
        return self.restore_s + self.inject_s + self.compute_s


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt, ready to go on from.

    Attributes:
        past_key_values: The model's cache, holding K/V of every prompt token.
        logits: (1, vocabulary) after the last token.
        restored_tokens: Tokens whose K/V came from the store.
        computed_tokens: Tokens that the model computed, at least 1.
        stored_tokens: Tokens in new blocks that the store accepted.
        timings: Where the time went.
    """

    past_key_values: DynamicCache
    logits: torch.Tensor
    restored_tokens: int
    computed_tokens: int
    stored_tokens: int
    timings: PrefillTimings

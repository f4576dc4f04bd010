"""Calls of the model itself: a fresh cache, and the forward pass over a piece of a prompt."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from kvstore_transformers.support import dynamic_layers

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


class Forward:
    """Runs a causal language model over pieces of one prompt.

    Holds no state between calls; as thread-safe as the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Adapter wrappers hide the signature behind **kwargs.
        unwrap = getattr(model, "get_base_model", None)
        parameters = inspect.signature((unwrap() if unwrap else model).forward).parameters
        # transformers renamed `past_key_values` to `cache` within the 5.x series.
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        # Without this the LM head runs over every token of the prompt, only to be thrown away.
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def new_cache(self) -> DynamicCache:
        """Make an empty cache with the layers that the model needs.

        Raises:
            NotImplementedError: A layer is not plain full attention.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        dynamic_layers(cache)
        return cache

    @torch.no_grad()
    def run(self, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Compute the tokens that follow those in ``cache``, and add their K/V to it.

        Args:
            input_ids: (1, n_tokens) token ids; positions go on from the cache's length.
            cache: Holds the K/V of everything before; grows by ``n_tokens``.

        Returns:
            (1, vocabulary) logits after the last token.
        """
        arguments: dict[str, Any] = {self.cache_argument: cache}
        output = self._model(input_ids=input_ids.to(self._model.device), use_cache=True, **arguments, **self._last_only)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

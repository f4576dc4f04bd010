"""A causal language model whose prompts are looked up in a KV cache store first."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from kvstore.cache import KVCache
from kvstore.keys import KVCacheKey, TokenKey
from kvstore_transformers.forward import Forward
from kvstore_transformers.identity import identify_model
from kvstore_transformers.layout import blocks_of_cache, fill_cache, room_for_blocks
from kvstore_transformers.results import PrefillResult, PrefillTimings
from kvstore_transformers.support import check_adapter, check_generate_arguments, check_model, check_prompt

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel
    from transformers.generation.utils import GenerateOutput

    from kvstore.config import Config


def open_cache(
    model: PreTrainedModel,
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    *,
    block_tokens: int = 16,
    adapter: str | None = None,
    salt: bytes | str | None = None,
) -> CachedModel:
    """Open the store that ``config`` describes for a model; close it by ``with`` or ``close()``.

    Block spec and namespace follow from the model, see :func:`identify_model`: another model,
    other weights or another dtype never see these blocks.

    Args:
        model: Decoder-only causal language model in evaluation mode, on one device.
        config: A TOML file, a mapping or a :class:`kvstore.Config`.
        block_tokens: Tokens per block; only whole blocks are stored.
        adapter: ``"name@revision"`` of the active PEFT adapter; required when any is loaded.
        salt: Isolates a tenant: no block is shared with another salt.

    Raises:
        NotImplementedError: The model's KV cache cannot be stored exactly; the message says why.
        ValueError: Training mode, or PEFT adapters without ``adapter``.
        ConfigError: The config is wrong.
        BackendError: A required tier cannot be opened.

    Example:
        >>> with open_cache(model, "kvstore.toml") as cached:  # doctest: +SKIP
        ...     output = cached.generate(input_ids, max_new_tokens=32)
    """
    check_adapter(model, adapter)
    identity = identify_model(model, block_tokens=block_tokens)
    cache = KVCache.open(config, spec=identity.spec, namespace=identity.namespace)
    return CachedModel(model, cache, adapter=adapter, salt=salt)


class CachedModel:
    """Looks prompts up in the store, computes only the rest and stores new full blocks.

    What a prompt's passes take is told to the cache, which then declines loads that would be slower.

    One prompt per call (batch size 1).  A store that is empty, slow or down costs time and never
    changes a result: what it does not deliver is computed.  Calls may come from several threads if
    the model allows that.  Owns ``cache`` and closes it.

    How a prompt is cut: restored blocks, then the other full blocks in one forward pass, then the
    rest (1 to ``block_tokens`` tokens) in a second one, also when nothing was restored.  Matrix
    products round differently for another number of rows, so a prompt computed in one piece may
    decide a near-tie of two tokens differently from one that goes on from restored blocks,
    although K/V are equal bit for bit.  Cut alike, a cold and a fully restored prompt run the same
    last pass on the same K/V and give the same logits.  After a partial hit the first pass is
    shorter than a cold one, as with the prefix cache of any engine.

    Args:
        model: Decoder-only causal language model in evaluation mode.
        cache: An open cache with the spec and namespace that :func:`identify_model` gave for this
            model, whose weights have not changed since.
        adapter: ``"name@revision"`` of the active PEFT adapter.
        salt: Isolates a tenant.

    Raises:
        ValueError: The cache's blocks are not in the connector's layout.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        adapter: str | None = None,
        salt: bytes | str | None = None,
    ) -> None:
        if cache.spec.is_opaque or cache.spec.layout != "LCND" or cache.spec.kv != 2:
            msg = f"the cache holds {cache.spec}; open it with the spec of identify_model(model)"
            raise ValueError(msg)
        self.model = model
        self.cache = cache
        self._adapter = adapter
        self._salt = salt
        self._forward = Forward(model)

    def cached_tokens(self, input_ids: torch.Tensor) -> int:
        """How many leading tokens of a prompt could be restored right now; moves nothing.

        Args:
            input_ids: (1, n_tokens) token ids.
        """
        return self.cache.lookup(self._restorable(self._key(input_ids))).tokens

    def prefill(self, input_ids: torch.Tensor) -> PrefillResult:
        """Bring the model's cache to the end of a prompt, from the store as far as it goes.

        At least one token is computed, because logits are not stored.  New full blocks are copied
        and queued for storing before the call returns.

        Args:
            input_ids: (1, n_tokens) token ids, without padding.

        Raises:
            ValueError: Not one prompt of token ids, or the model was changed (training mode, adapters).
            ClosedError: The cache is closed.
        """
        prompt = self._begin(input_ids)
        start_s = self._now()
        logits = self._forward.run(input_ids[:, prompt.full_tokens :], prompt.cache)
        computed_s = self._now()
        stored_tokens = self._store(prompt.key, prompt)
        timings = PrefillTimings(
            restore_s=prompt.restore_s,
            inject_s=prompt.inject_s,
            compute_s=prompt.compute_s + computed_s - start_s,
            store_s=self._now() - computed_s,
        )
        restored_tokens = prompt.restored_blocks * self.cache.spec.block_tokens
        return PrefillResult(
            past_key_values=prompt.cache,
            logits=logits,
            restored_tokens=restored_tokens,
            computed_tokens=input_ids.shape[1] - restored_tokens,
            stored_tokens=stored_tokens,
            timings=timings,
        )

    def generate(
        self, input_ids: torch.Tensor, *, store_generated: bool = False, **arguments: Any
    ) -> GenerateOutput | torch.LongTensor:
        """Call the model's ``generate`` with its cache filled from the store.

        Args:
            input_ids: (1, n_tokens) token ids, without padding.
            store_generated: Store full blocks of generated tokens too, for the next turn of a
                conversation; otherwise only blocks of the prompt.
            **arguments: Passed on to ``model.generate``: ``max_new_tokens``, ``do_sample``,
                ``streamer``, ``generation_config``, ...

        Returns:
            What ``model.generate`` returns: prompt and new tokens, or its output object.

        Raises:
            ValueError: Not one prompt of token ids, or several sequences were asked for.
            NotImplementedError: Arguments that need another cache class (static, quantized,
                assisted decoding).
            ClosedError: The cache is closed.
        """
        check_generate_arguments(self.model, arguments)
        prompt = self._begin(input_ids)
        # Given explicitly: generate() would otherwise guess a mask when the prompt holds padding ids.
        arguments["attention_mask"] = torch.ones_like(input_ids)
        arguments[self._forward.cache_argument] = prompt.cache
        output: GenerateOutput | torch.LongTensor = cast("Any", self.model).generate(input_ids, **arguments)
        key = prompt.key
        if store_generated:
            sequence = output if isinstance(output, torch.Tensor) else output.sequences
            # The last token was chosen and never computed: the cache ends before it.
            key = self._key(sequence[:, : prompt.cache.get_seq_length()])
        self._store(key, prompt)
        return output

    def close(self) -> None:
        """Flush and close the store; idempotent.  The model stays usable."""
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, input_ids: torch.Tensor) -> _Prompt:
        """Restore what the store has and compute the other full blocks before the last token."""
        check_model(self.model)
        check_adapter(self.model, self._adapter)
        start_s = self._now()
        key = self._key(input_ids)
        wanted = self._restorable(key)
        room, as_blocks = room_for_blocks(self.cache.spec, len(wanted))
        n_blocks = self.cache.get(wanted, as_blocks) if wanted else 0
        restored_s = self._now()
        cache = self._forward.new_cache()
        n_tokens = n_blocks * self.cache.spec.block_tokens
        if n_blocks:
            fill_cache(cache, room[:, :, :, :n_tokens].to(self.model.device))
        injected_s = self._now()
        if n_blocks < len(wanted):
            self._forward.run(input_ids[:, n_tokens : wanted.n_tokens], cache)
        computed_s = self._now()
        # What is left over, of less than a block, is computed apart and says nothing about the speed.
        self.cache.note_prefill(wanted.n_tokens - n_tokens, computed_s - injected_s, context_tokens=n_tokens)
        return _Prompt(
            key=key,
            cache=cache,
            restored_blocks=n_blocks,
            full_tokens=wanted.n_tokens,
            restore_s=restored_s - start_s,
            inject_s=injected_s - restored_s,
            compute_s=computed_s - injected_s,
        )

    def _store(self, key: TokenKey, prompt: _Prompt) -> int:
        """Queue the blocks of ``key`` that were not restored; return the tokens accepted."""
        new = key.suffix(prompt.restored_blocks)
        if not new:
            return 0
        blocks = blocks_of_cache(prompt.cache, self.cache.spec, prompt.restored_blocks, len(new))
        return self.cache.put(new, blocks) * self.cache.spec.block_tokens

    def _key(self, input_ids: torch.Tensor) -> TokenKey:
        check_prompt(input_ids)
        tokens = input_ids[0].cpu()
        return KVCacheKey.from_tokens(
            tokens, block_tokens=self.cache.spec.block_tokens, adapter=self._adapter, salt=self._salt
        )

    def _restorable(self, key: TokenKey) -> TokenKey:
        """The blocks worth restoring: never the whole prompt, since its last token gives the logits."""
        return key if key.n_tail_tokens else key.prefix(max(0, len(key) - 1))

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt whose full blocks before the last token are in the model's cache."""

    key: TokenKey
    cache: DynamicCache
    restored_blocks: int
    full_tokens: int
    restore_s: float
    inject_s: float
    compute_s: float

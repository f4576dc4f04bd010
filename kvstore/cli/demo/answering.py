"""The two processes of the real demo: one computes and stores, the other restores and compares."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.demo import model as smollm2
from kvstore.cli.demo.facts import Answer, Computed, Restored, Setup, Stored
from kvstore.cli.demo.hashing import tensor_sha256
from kvstore.cli.demo.prompts import QUESTIONS, document_text, fit_document, user_message
from kvstore.cli.demo.store import CODEC, store_config, tier_folder

if TYPE_CHECKING:
    import torch
    from kvstore_transformers import CachedModel, ModelIdentity, PrefillResult
    from kvstore_transformers.forward import Forward
    from transformers import DynamicCache

Say = Callable[[str], None]

_BLOCK_TOKENS: Final = 16
_WARMUP_TOKENS: Final = 64
_FLUSH_TIMEOUT_S: Final = 120.0
_MORE_OPENINGS: Final = 4  # one restore takes a fraction of a second, which any other process can spoil


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is asked to do.

    Attributes:
        model: Folder of the converted model.
        store: Folder of the store.
        tokens: Length of the first prompt, about.
        new_tokens: Tokens of an answer, at most.
        dtype: ``bfloat16`` or ``float32``.
    """

    model: str
    store: str
    tokens: int
    new_tokens: int
    dtype: str


def compute(job: Job, say: Say) -> dict[str, Any]:
    """Answer the first question with an empty store, which then holds the prompt's K/V."""
    session = _Session(job, say)
    prompt = session.prompt(QUESTIONS[0])
    say(f"computing {prompt.shape[1]} tokens")
    answer, cache = session.answer(QUESTIONS[0], prompt)
    start_s = time.perf_counter()
    session.cached.cache.flush(_FLUSH_TIMEOUT_S)
    flush_s = time.perf_counter() - start_s
    counters = session.cached.cache.stats().tiers[0].counters
    n_blocks = (prompt.shape[1] - 1) // _BLOCK_TOKENS
    stored = Stored(
        blocks=counters.stored,
        block_tokens=_BLOCK_TOKENS,
        raw_bytes=counters.stored_raw_bytes,
        stored_bytes=counters.stored_bytes,
        codec=CODEC,
        path=str(tier_folder(Path(job.store))),
        flush_s=flush_s,
    )
    facts = Computed(os.getpid(), session.machine(), session.setup, answer, stored, session.kv_sha256(cache, n_blocks))
    session.close()
    return asdict(facts)


def restore(job: Job, say: Say) -> dict[str, Any]:
    """Answer both questions from the store; then compute them without it, and compare."""
    session = _Session(job, say)
    prompts = [session.prompt(question) for question in QUESTIONS]
    say("restoring")
    answers, caches = [], []
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        answer, cache = session.answer(question, prompt)
        answers.append(answer)
        caches.append(cache)
    ttfts_s = [answers[0].ttft_s, *(session.ttft_reopened_s(prompts[0]) for _ in range(_MORE_OPENINGS))]
    say("computing the same without the store, to compare")
    n_blocks = answers[0].restored_tokens // _BLOCK_TOKENS
    recomputed, cache = session.answer_without_store(QUESTIONS[0], prompts[0])
    facts = Restored(
        pid=os.getpid(),
        setup=session.setup,
        answers=answers,
        ttfts_s=ttfts_s,
        recomputed=recomputed,
        kv_sha256=session.kv_sha256(caches[0], n_blocks),
        recomputed_kv_sha256=session.kv_sha256(cache, n_blocks),
        reference_token_ids=session.continue_without_store(prompts[1], cache, answers[1].restored_tokens),
    )
    session.close()
    return asdict(facts)


class _Session:
    """A loaded, warmed-up model with the store open."""

    def __init__(self, job: Job, say: Say) -> None:
        self._job = job
        clock = _Clock()
        say("importing torch and transformers")
        import torch
        import transformers
        from kvstore_transformers import identify_model
        from kvstore_transformers.forward import Forward

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        import_s = clock.lap()
        say("loading the model")
        self.dtype = getattr(torch, job.dtype)
        model, self._tokenizer = smollm2.load(Path(job.model), self.dtype)
        load_s = clock.lap()
        identity = identify_model(model, block_tokens=_BLOCK_TOKENS)
        clock.lap()
        self._identity: ModelIdentity = identity
        self._model = model
        self.cached = self._open()
        self._forward: Forward = Forward(model)
        open_s = clock.lap()
        # Lazily built kernels and buffers are paid here, by either process, and not by the first answer.
        warm = self._forward.new_cache()
        for n_tokens in (_WARMUP_TOKENS, 1):
            self._forward.run(torch.zeros((1, n_tokens), dtype=torch.int64), warm)
        self.setup = Setup(import_s, load_s, identity.fingerprint.seconds, open_s, clock.lap())
        self._document = fit_document(
            document_text(), job.tokens, lambda text: self._ids(user_message(text, QUESTIONS[0])).shape[1]
        )

    def prompt(self, question: str) -> torch.Tensor:
        """(1, n_tokens) token ids of document and question."""
        return self._ids(user_message(self._document, question))

    def answer(self, question: str, prompt: torch.Tensor) -> tuple[Answer, DynamicCache]:
        """Answer through the store."""
        result = self.cached.prefill(prompt)
        first, ttft_s = _first_token(result)
        token_ids = self._finish(first, result.past_key_values)
        answer = Answer(
            question=question,
            text=self._text(token_ids),
            token_ids=token_ids,
            prompt_tokens=prompt.shape[1],
            restored_tokens=result.restored_tokens,
            ttft_s=ttft_s,
            restore_s=result.timings.restore_s,
            inject_s=result.timings.inject_s,
            compute_s=result.timings.compute_s,
        )
        return answer, result.past_key_values

    def ttft_reopened_s(self, prompt: torch.Tensor) -> float:
        """Seconds to first token with the store opened anew, so that nothing is left in memory."""
        self.cached.close()
        self.cached = self._open()
        return _first_token(self.cached.prefill(prompt))[1]

    def answer_without_store(self, question: str, prompt: torch.Tensor) -> tuple[Answer, DynamicCache]:
        """Answer with the model alone, the prompt cut as the connector cuts it."""
        full_tokens = (prompt.shape[1] - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
        clock = _Clock()
        cache = self._forward.new_cache()
        self._forward.run(prompt[:, :full_tokens], cache)
        first = int(self._forward.run(prompt[:, full_tokens:], cache).argmax())
        ttft_s = clock.lap()
        token_ids = self._finish(first, cache)
        answer = Answer(
            question, self._text(token_ids), token_ids, prompt.shape[1], 0, ttft_s, 0.0, 0.0, compute_s=ttft_s
        )
        return answer, cache

    def continue_without_store(self, prompt: torch.Tensor, computed: DynamicCache, n_tokens: int) -> list[int]:
        """Answer ``prompt`` from ``n_tokens`` leading tokens of K/V that this process computed."""
        from kvstore_transformers.layout import blocks_of_cache, fill_cache, room_for_blocks

        spec = self.cached.cache.spec
        room, as_blocks = room_for_blocks(spec, n_tokens // _BLOCK_TOKENS)
        as_blocks.copy_(blocks_of_cache(computed, spec, 0, n_tokens // _BLOCK_TOKENS))
        cache = self._forward.new_cache()
        fill_cache(cache, room)
        full_tokens = (prompt.shape[1] - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
        if full_tokens > n_tokens:
            self._forward.run(prompt[:, n_tokens:full_tokens], cache)
        return self._finish(int(self._forward.run(prompt[:, full_tokens:], cache).argmax()), cache)

    def kv_sha256(self, cache: DynamicCache, n_blocks: int) -> str:
        """SHA-256 (hex) of the first blocks of a model cache, all layers, K and V."""
        from kvstore_transformers.layout import blocks_of_cache

        return tensor_sha256(blocks_of_cache(cache, self.cached.cache.spec, 0, n_blocks))

    def machine(self) -> dict[str, str]:
        """What the numbers were measured with."""
        import torch
        import transformers

        return {
            "model": smollm2.MODEL_NAME,
            "dtype": str(self.dtype).removeprefix("torch."),
            "CPU bfloat16": "native" if _has_bfloat16() else "emulated",
            "threads": str(torch.get_num_threads()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def close(self) -> None:
        """Close the store."""
        self.cached.close()

    def _open(self) -> CachedModel:
        from kvstore_transformers import CachedModel

        from kvstore import KVCache

        identity = self._identity
        cache = KVCache.open(store_config(Path(self._job.store)), spec=identity.spec, namespace=identity.namespace)
        return CachedModel(self._model, cache)

    def _finish(self, first: int, cache: DynamicCache) -> list[int]:
        """Greedy tokens from the first one to the end of the answer."""
        import torch

        token_ids = [first]
        while len(token_ids) < self._job.new_tokens and token_ids[-1] != self._tokenizer.eos_token_id:
            logits = self._forward.run(torch.tensor([token_ids[-1:]]), cache)
            token_ids.append(int(logits.argmax()))
        return token_ids

    def _ids(self, message: str) -> torch.Tensor:
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        ids: torch.Tensor = self._tokenizer(chat, add_special_tokens=False, return_tensors="pt").input_ids
        return ids

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


def _first_token(result: PrefillResult) -> tuple[int, float]:
    """The greedy first token, and the seconds from prompt ids ready until it was known."""
    clock = _Clock()
    return int(result.logits.argmax()), result.timings.to_logits_s + clock.lap()


def _has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions; without them computing, and so a cold prompt, is slow."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


class _Clock:
    """Seconds between one lap and the next."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last_s, self._last_s = self._last_s, time.perf_counter()
        return self._last_s - last_s

"""Load or recompute: what a tier's self-test says about loading the KV of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.backend import Finding
from kvstore.cli.output import size
from kvstore.fitting import straight_line

if TYPE_CHECKING:
    from kvstore.cli.selftest import Timings

PROMPT_TOKENS: Final = (1024, 8192, 32768)
_SAME: Final = 1.02  # speeds that differ less are shown as one
_EXAMPLE_BLOCK_BYTES: Final = 2 << 20
_EXAMPLE_BLOCK_TOKENS: Final = 16
_EXAMPLE: Final = "an example: 32 layers, 8 KV heads of 128 elements, bfloat16"


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """What the blocks of a prompt are.

    Attributes:
        block_bytes: Length of one.
        block_tokens: Tokens of one.
        source: Who said so, for people.
    """

    block_bytes: int = _EXAMPLE_BLOCK_BYTES
    block_tokens: int = _EXAMPLE_BLOCK_TOKENS
    source: str = _EXAMPLE

    @property
    def token_bytes(self) -> float:
        """Bytes of one token."""
        return self.block_bytes / self.block_tokens


def stored_blocks(descriptions: Sequence[bytes]) -> PromptBlocks | None:
    """The largest blocks, by bytes a token, among the namespaces that a store describes; None without any."""
    from kvstore.cli.namespaces import parse_document

    found = [described for data in descriptions if (described := parse_document(data)) is not None]
    blocks = [PromptBlocks(spec.nbytes, spec.block_tokens, f"as stored for {ns.model}") for ns, spec in found]
    return max(blocks, key=lambda b: b.token_bytes, default=None)


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """One prompt.

    Attributes:
        tokens: Its length.
        load_s: Seconds to load its KV.
        recompute_s: Seconds to compute it; None when the prefill speed is not known.
        break_even_tokens_per_s: Loading pays for every engine that prefills slower than this.
    """

    tokens: int
    load_s: float
    recompute_s: float | None
    break_even_tokens_per_s: float

    @property
    def pays(self) -> bool | None:
        """Whether loading is faster; None when the prefill speed is not known."""
        return None if self.recompute_s is None else self.load_s < self.recompute_s


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """What loading prompts from one tier takes.

    Attributes:
        blocks: Of the prompts.
        latency_s: Seconds of a read besides its bytes.
        bytes_per_s: Bandwidth behind that; None when more bytes took no longer.
        prompts: Of several lengths.
        prefill_tokens_per_s: Prefill speed of the engine, None when it is not known.
    """

    blocks: PromptBlocks
    latency_s: float
    bytes_per_s: float | None
    prompts: tuple[PromptLoad, ...]
    prefill_tokens_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"prompts": [asdict(p) | {"pays": p.pays} for p in self.prompts]}

    def finding(self) -> Finding:
        """The verdict for people; a warning when loading does not pay."""
        loads = ", ".join(f"{_tokens(p.tokens)} in {_time(p.load_s)}" for p in self.prompts)
        what = f"loading a prompt's KV ({size(self.blocks.token_bytes)} a token, {self.blocks.source}): {loads}"
        if self.prefill_tokens_per_s is None:
            return Finding("ok", what, f"this tier pays for any engine that prefills slower than {self._break_even()}")
        against = "; ".join(f"{_tokens(p.tokens)}: {_compared(p)}" for p in self.prompts)
        advice = f"against recomputing at {self.prefill_tokens_per_s:,.0f} tokens/s: {against}"
        return Finding("ok" if self.prompts[-1].pays else "warning", what, advice)

    def _break_even(self) -> str:
        speeds = [p.break_even_tokens_per_s for p in self.prompts]
        if max(speeds) < _SAME * min(speeds):
            return f"{min(speeds):,.0f} tokens/s"
        each = (f"{p.break_even_tokens_per_s:,.0f} (prompts of {_tokens(p.tokens)})" for p in self.prompts)
        return f"{', '.join(each)} tokens/s"


def judge(timings: Timings, blocks: PromptBlocks, prefill_tokens_per_s: float = 0.0) -> LoadVerdict:
    """Reckon what prompts take from a read of one record and one of several.

    The self-test reads with one thread and without verifying; a cache verifies, and reads media that are
    not plain memory with several.  Records are taken as stored raw.

    Args:
        timings: Of the tier.
        blocks: Of the prompts.
        prefill_tokens_per_s: Of the engine; 0 when it is not known.
    """
    one, several = timings.record_bytes, timings.records * timings.record_bytes
    line = straight_line([(one, timings.one_get_s), (several, timings.get_s)])
    latency_s, byte_s = line or (0.0, timings.get_s / several)

    def prompt(tokens: int) -> PromptLoad:
        load_s = max(latency_s + tokens * blocks.token_bytes * byte_s, 1e-9)
        recompute_s = tokens / prefill_tokens_per_s if prefill_tokens_per_s else None
        return PromptLoad(tokens, load_s, recompute_s, tokens / load_s)

    return LoadVerdict(
        blocks=blocks,
        latency_s=latency_s,
        bytes_per_s=1.0 / byte_s if byte_s else None,
        prompts=tuple(prompt(tokens) for tokens in PROMPT_TOKENS),
        prefill_tokens_per_s=prefill_tokens_per_s or None,
    )


def _compared(prompt: PromptLoad) -> str:
    recompute_s = prompt.recompute_s or 0.0
    if prompt.pays:
        return f"loading is {recompute_s / prompt.load_s:,.1f} times faster"
    return f"loading is {prompt.load_s / recompute_s:,.1f} times slower, and is declined"


def _tokens(tokens: int) -> str:
    return f"{tokens // 1024}k tokens"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"

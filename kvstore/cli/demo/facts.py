"""What the demo's processes measured, as plain data that travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process does before it can answer; in seconds, not part of any time to first token."""

    import_s: float
    load_s: float
    fingerprint_s: float
    open_s: float
    warmup_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One question answered.

    Attributes:
        question: The question.
        text: The answer.
        token_ids: Its tokens.
        prompt_tokens: Tokens of document, question and chat template.
        restored_tokens: Of these, how many came from the store.
        ttft_s: Seconds from prompt ids ready to first new token.
        restore_s: Of these, reading, verifying and decoding.
        inject_s: Handing restored K/V to the model.
        compute_s: Forward passes.
    """

    question: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    restored_tokens: int
    ttft_s: float
    restore_s: float
    inject_s: float
    compute_s: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model computed."""
        return self.prompt_tokens - self.restored_tokens


@dataclass(frozen=True, slots=True)
class Stored:
    """What the first process left in the store.

    Attributes:
        blocks: Blocks stored.
        block_tokens: Tokens per block.
        raw_bytes: Their size as tensors.
        stored_bytes: Their size as records.
        codec: Codec of the tier.
        path: Where they are.
        flush_s: Seconds from the answer until everything was stored.
    """

    blocks: int
    block_tokens: int
    raw_bytes: int
    stored_bytes: int
    codec: str
    path: str
    flush_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The first process: an empty store, everything computed."""

    pid: int
    machine: dict[str, str]
    setup: Setup
    answer: Answer
    stored: Stored
    kv_sha256: str

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Read what :func:`dataclasses.asdict` wrote."""
        parts = {"setup": Setup, "answer": Answer, "stored": Stored}
        return cls(**{name: parts[name](**value) if name in parts else value for name, value in document.items()})


@dataclass(frozen=True, slots=True)
class Restored:
    """The second process: restored from the store, then computed again without it to compare.

    Attributes:
        pid: Process id, not the first process's.
        setup: What it did first.
        answers: The first question again, and another one about the same document.
        ttfts_s: Seconds to the first token of the first question, each time with the store opened anew;
            the first of them is the first answer's.
        recomputed: The first question without the store, in this process.
        kv_sha256: Digest of the restored K/V.
        recomputed_kv_sha256: Digest of the same blocks, computed in this process.
        reference_token_ids: Answer to the second question, computed without the store.
    """

    pid: int
    setup: Setup
    answers: list[Answer]
    ttfts_s: list[float]
    recomputed: Answer
    kv_sha256: str
    recomputed_kv_sha256: str
    reference_token_ids: list[int]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Read what :func:`dataclasses.asdict` wrote."""
        read = dict(document)
        read["setup"] = Setup(**document["setup"])
        read["answers"] = [Answer(**answer) for answer in document["answers"]]
        read["recomputed"] = Answer(**document["recomputed"])
        return cls(**read)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing the demo proves, or fails to."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both processes, and what follows from comparing them."""

    computed: Computed
    restored: Restored
    min_ratio: float

    @property
    def cold_s(self) -> float:
        """Cold time to first token: the better of the two cold measurements, so as not to flatter."""
        return min(self.computed.answer.ttft_s, self.restored.recomputed.ttft_s)

    @property
    def restored_s(self) -> float:
        """Restored time to first token of the same prompt: the first opening in the new process."""
        return self.restored.ttfts_s[0]

    @property
    def ratio(self) -> float:
        """How many times faster restoring was."""
        return self.cold_s / self.restored_s

    def checks(self) -> list[Check]:
        """Everything that must hold for the demo to be green."""
        first, second = self.restored.answers
        digests = {self.computed.kv_sha256, self.restored.kv_sha256, self.restored.recomputed_kv_sha256}
        same_first = first.token_ids == self.computed.answer.token_ids == self.restored.recomputed.token_ids
        same_second = second.token_ids == self.restored.reference_token_ids
        restored = " and ".join(f"{answer.restored_tokens} of {answer.prompt_tokens}" for answer in (first, second))
        checks = [
            Check(
                "new process", self.restored.pid != self.computed.pid, f"{self.computed.pid}, then {self.restored.pid}"
            ),
            Check("restored", min(first.restored_tokens, second.restored_tokens) > 0, f"{restored} tokens"),
            Check("bit-identical", len(digests) == 1, f"sha256 {self.restored.kv_sha256[:16]} of all restored K/V"),
            Check(
                "tokens identical",
                same_first and same_second,
                f"{len(first.token_ids)} and {len(second.token_ids)} tokens",
            ),
        ]
        if self.min_ratio > 0:
            checks.append(
                Check("fast enough", self.ratio >= self.min_ratio, f"{self.ratio:.1f}x, at least {self.min_ratio:g}x")
            )
        return checks

"""What the scheduler half tells every worker half about one step: plain data, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one request.

    Attributes:
        request_id: Whose they are.
        block_ids: vLLM's pages, one per block.
        start_block: Number of the first of them in the request.
        hashes: vLLM's block hashes from ``first_hash`` up to the last of the blocks; a chain, so that each
            stands for all tokens up to its end.
        first_hash: Number of the block of ``hashes[0]``: 0 at first, so that the blocks' place is known;
            later runs of the request go on from the one before.
    """

    request_id: str
    block_ids: tuple[int, ...]
    start_block: int
    hashes: tuple[bytes, ...]
    first_hash: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine.

    Attributes:
        loads: Blocks to fill from the store.
        saves: Blocks that are computed in full when the step ends, to be stored.
        layerwise: Whether ``loads`` are consumed by this step's forward pass.
        resets: How many resets there were since the start; a worker that has seen fewer follows them first.
        clears: Whether a reset empties the store, or only goes on under another salt.
        salt: What isolates the engine's blocks since the last reset.
        idle: Nothing is computed in this step, so that a worker may wait for a load for a moment.
        tokens: Tokens that this step computes.
        context_tokens: Tokens before those of its requests, on the average of the computed ones.
    """

    loads: tuple[BlockRun, ...] = ()
    saves: tuple[BlockRun, ...] = ()
    layerwise: bool = False
    resets: int = 0
    clears: bool = True
    salt: str | None = None
    idle: bool = False
    tokens: int = 0
    context_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """Sums since they were last taken; what a half reports to vLLM's metrics."""

    sums: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float = 1) -> None:
        """Add to one sum; the caller holds whatever lock there is."""
        self.sums[name] = self.sums.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """Return the sums and begin anew."""
        sums, self.sums = self.sums, {}
        return sums

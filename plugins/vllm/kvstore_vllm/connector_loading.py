"""Loads that are under way, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

Evict = Callable[[set[int]], None]


class AsyncLoads:
    """Loads of requests that wait for them; vLLM shares none of their blocks before they are over."""

    def __init__(self) -> None:
        self._blocks: dict[str, frozenset[int]] = {}

    def add(self, request_id: str, block_ids: Iterable[int]) -> None:
        """A load was planned."""
        self._blocks[request_id] = frozenset(block_ids)

    def failed(self, block_ids: Collection[int]) -> list[str]:
        """The requests that lack some of these blocks."""
        return [request_id for request_id, blocks in self._blocks.items() if not blocks.isdisjoint(block_ids)]

    def ended(self, request_ids: Iterable[str]) -> None:
        """Loads that are over, or whose request is."""
        for request_id in request_ids:
            self._blocks.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


@dataclass(frozen=True, slots=True)
class _StepLoad:
    request_id: str
    hashes: frozenset[bytes]
    block_ids: tuple[int, ...]


class StepLoads:
    """Loads that happen while the step runs that needs them.

    vLLM puts such blocks into its prefix cache when they are allocated, before anybody knows whether the
    load will be good.  Two things keep that from doing harm.  A request that would share such a block waits
    for the next step (:meth:`shares`).  When a load has failed, its blocks and those that were computed
    from them leave the prefix cache (:meth:`failed`), so that nobody finds them there if the request is
    aborted or preempted before it has computed them.

    Attributes:
        evict: Takes blocks out of vLLM's prefix cache; None when this vLLM has no way to do it, and
            then nothing may be loaded in this manner.
    """

    def __init__(self) -> None:
        self.evict: Evict | None = None
        self._scheduled: list[_StepLoad] = []
        self._running: list[_StepLoad] = []

    def add(self, request_id: str, hashes: Iterable[bytes], block_ids: Sequence[int]) -> None:
        """A load was planned for the step that is being scheduled.

        Args:
            request_id: Whose.
            hashes: Of the blocks to load.
            block_ids: The request's blocks from the first of them on, also those that the step computes.
        """
        self._scheduled.append(_StepLoad(request_id, frozenset(hashes), tuple(block_ids)))

    def shares(self, hashes: Iterable[bytes]) -> bool:
        """Whether one of these blocks is being loaded by the step that is being scheduled."""
        return bool(self._scheduled) and any(not load.hashes.isdisjoint(hashes) for load in self._scheduled)

    def step(self) -> None:
        """The step is scheduled; the one before is over."""
        self._running, self._scheduled = self._scheduled, []

    def failed(self, block_ids: Collection[int]) -> list[str]:
        """Take what depends on these blocks out of the prefix cache; the requests that lack some of them."""
        affected = []
        for load in self._running:
            first = next((i for i, block in enumerate(load.block_ids) if block in block_ids), None)
            if first is not None:
                affected.append(load.request_id)
                if self.evict is not None:
                    self.evict(set(load.block_ids[first:]))
        return affected

"""Layer-wise restore: the first layers of a prompt are handed over while later ones are being read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvstore.backend import Capability
from kvstore.segments import plan_segments
from kvstore.served import L1, Served
from kvstore.stream_sources import LayerPlan, Order, ResidentSource, StreamSource, TierSource
from kvstore.visits import admitted

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.loads import Loads
    from kvstore.spec import BlockSpec
    from kvstore.stack import Stack

Meet = Callable[[float, int, Sequence[int]], list[int]]
"""Gets when a step began, the number of groups (0 before they are cut) and what this rank found; returns the
least that any rank found."""

_LOCAL_GROUP_BYTES: Final = 256 << 10  # a segment: local media lose nothing by small reads of many blocks
_REMOTE_GROUP_BYTES: Final = 1 << 20  # a request costs as much as moving about this many bytes


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Some layers of the leading blocks of a key.

    Attributes:
        first_layer: The first of them.
        n_layers: How many.
        n_blocks: Leading blocks that are good in this and in every earlier group.  It may shrink
            from group to group when a later part of a record turns out to be missing or damaged:
            the last group's number is the one that counts for the whole.
        tensor: ``(n_blocks, n_layers, *spec.shape[1:])`` of spec.dtype in host memory of its own;
            ``(n_blocks, *spec.shape)`` where layers are not the outermost axis.
    """

    first_layer: int
    n_layers: int
    n_blocks: int
    tensor: torch.Tensor


def plan_layers(spec: BlockSpec, least_bytes: int) -> list[LayerPlan]:
    """Cut a block into groups of whole segments of at least ``least_bytes`` raw bytes.

    A layout whose outermost axis is not the layers gives one group: its segments hold a piece of
    every layer.
    """
    segments = plan_segments(spec)
    if not spec.axes.startswith("L"):
        return [LayerPlan(0, segments)]
    cuts, nbytes, rest = [0], 0, spec.nbytes
    for i, segment in enumerate(segments[:-1], 1):
        nbytes += segment.raw_bytes
        rest -= segment.raw_bytes
        if nbytes >= least_bytes and rest >= least_bytes:
            cuts.append(i)
            nbytes = 0
    return [LayerPlan(a, segments[a:b]) for a, b in itertools.pairwise([*cuts, len(segments)])]


class LayerStream:
    """One layer-wise read of a key; belongs to one thread.

    Every block is assigned to the first source that says it has it, once, at the start.  While a
    group is with the caller the next one is being read.

    Args:
        stack: The open cache.
        loads: Its loads, which count what a call used.
        key: The wanted blocks.
        meet: Agrees with other ranks on what this one found; they cut the layers alike and go on
            with the blocks that all of them have.
    """

    def __init__(self, stack: Stack, loads: Loads, key: KVCacheKey, meet: Meet | None = None) -> None:
        self._stack = stack
        self._loads = loads
        self._key = key
        self._meet = meet
        self._spec = stack.identity.spec
        self._sources: list[StreamSource] = []
        self._waited_s = 0.0

    def groups(self) -> Iterator[LayerGroup]:
        """Yield the layers in order; ends early when no leading block is left."""
        served = Served(self._key)
        n_blocks, began, complete = 0, time.monotonic(), False
        try:
            n_blocks = self._assign(served)
            self._waited_s = time.monotonic() - began
            remote = self._remote()
            if self._meet is not None:
                n_blocks, local = self._meet(began, 0, [n_blocks, not remote])
                remote = not local
            plans = plan_layers(self._spec, _REMOTE_GROUP_BYTES if remote else _LOCAL_GROUP_BYTES)
            memory = self._start(plans[0], n_blocks) if n_blocks else None
            for following, plan in enumerate(plans, 1):
                if memory is None:
                    break
                began = time.monotonic()
                n_blocks = self._collect(n_blocks)
                self._waited_s += time.monotonic() - began
                if self._meet is not None:
                    (n_blocks,) = self._meet(began, len(plans), [n_blocks])
                ready = memory
                memory = self._start(plans[following], n_blocks) if n_blocks and following < len(plans) else None
                if n_blocks:
                    yield self._group(plan, ready, n_blocks)
            complete = True
        finally:
            for source in self._sources:
                source.close()
            self._note(served, n_blocks)
            if complete:
                self._note_times(n_blocks)
            self._loads.conclude(served)

    def _assign(self, served: Served) -> int:
        """Decide which source delivers which blocks; returns how many leading blocks there are."""
        stack, key, until = self._stack, self._key, self._loads.until()
        done, n = 0, len(key)
        while done < n and time.monotonic() < until:
            start = done
            if stack.l1 is not None:
                entries = stack.l1.pin_leading(key.digests[done:])
                served.note(L1, done, 0)
                if entries:
                    self._sources.append(ResidentSource(L1, stack.l1, entries, range(done, done + len(entries))))
                    done += len(entries)
            for open_tier in stack:
                if done == n:
                    break
                served.note(open_tier.tier.name, done, 0)
                if not admitted(stack, open_tier, served, done):
                    continue
                run = open_tier.tier.leading(key, done, until)
                if run and admitted(stack, open_tier, served, done, done + run):
                    self._sources.append(TierSource(open_tier, key, range(done, done + run)))
                    done += run
            if done == start:
                break
        return done

    def _remote(self) -> bool:
        return any(
            isinstance(s, TierSource) and bool(s.open_tier.tier.backend.capabilities & Capability.PARALLEL)
            for s in self._sources
        )

    def _start(self, plan: LayerPlan, n_blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        memory = np.empty((n_blocks, plan.raw_bytes), np.uint8)
        until = self._loads.until()
        for source in self._within(n_blocks):
            rows = list(memory[source.indices.start : source.indices.stop])
            source.start(Order(plan, rows, until))
        return memory

    def _collect(self, n_blocks: int) -> int:
        """Wait for every source; returns the leading blocks that all of them together delivered."""
        good = n_blocks
        for source in self._within(n_blocks):
            got = source.collect()
            if got < min(source.indices.stop, n_blocks) - source.indices.start:
                good = min(good, source.indices.start + got)
        return good

    def _within(self, n_blocks: int) -> Sequence[StreamSource]:
        return [source for source in self._sources if source.indices.start < n_blocks]

    def _group(
        self, plan: LayerPlan, memory: np.ndarray[tuple[int, int], np.dtype[np.uint8]], n_blocks: int
    ) -> LayerGroup:
        spec = self._spec
        items = sum(segment.items for segment in plan.segments)
        flat = torch.from_numpy(memory[:n_blocks]).view(spec.torch_dtype())
        tensor = flat.view(n_blocks, items, *spec.shape[1:])
        if spec.axes.startswith("L"):
            return LayerGroup(plan.segments[0].first_item, items, n_blocks, tensor)
        return LayerGroup(0, spec.layers, n_blocks, tensor)

    def _note(self, served: Served, n_blocks: int) -> None:
        for source in self._within(n_blocks):
            served.note(source.name, source.indices.start, min(source.indices.stop, n_blocks) - source.indices.start)

    def _note_times(self, n_blocks: int) -> None:
        """Tell a tier how long the stream has waited for it: what is read while others compute costs nothing."""
        sources = self._within(n_blocks)
        if len(sources) == 1 and isinstance(sources[0], TierSource):
            sources[0].open_tier.reader.note_read(n_blocks, self._waited_s, failed=False)

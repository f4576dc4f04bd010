"""Legal calls: what is asked for, and a sequence of calls under way on both libraries.

Legal means what AIBrix's own documentation and its callers do: prefix and query are cut from one
sequence at whole blocks, a block's bytes follow from its key, and a handle is released once or put.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from tests.engines.aibrix.pair import BLOCK_TOKENS, Pair, Side, block_bytes, raw

N_BLOCKS = 10
SHARED_BLOCKS = 4
PROMPTS = tuple([7 * i for i in range(SHARED_BLOCKS * 4)] + [1000 * p + i for i in range(24)] for p in (1, 2, 3))
"""Three prompts of ten blocks with a common head."""

FORMS = ("pair", "query named", "both named", "key", "key named")


def hashes_of(tokens: list[int]) -> list[str]:
    hashes, chained = [], b""
    for start in range(0, len(tokens), BLOCK_TOKENS):
        chained = hashlib.sha256(chained + repr(tokens[start : start + BLOCK_TOKENS]).encode()).digest()
        hashes.append(chained.hex())
    return hashes


@dataclass(frozen=True, repr=False)
class Run:
    """Blocks ``first`` to ``stop`` of a prompt, and some tokens of the next block.

    Attributes:
        prompt: Which.
        first: First block of the query.
        stop: Behind its last.
        extra_tokens: Tokens of an incomplete last block; keys of hashes have none.
        none_prefix: Say None where the prefix is empty.
        fresh: Use new key objects.
        form: How the call is written.
    """

    prompt: int
    first: int
    stop: int
    extra_tokens: int
    none_prefix: bool
    fresh: bool
    form: str

    def __repr__(self) -> str:
        names = "".join(" None" * self.none_prefix + " fresh" * self.fresh)
        return f"<prompt {self.prompt} blocks {self.first}:{self.stop} +{self.extra_tokens}{names} by {self.form}>"

    @property
    def n_blocks(self) -> int:
        return self.stop - self.first

    def labels(self) -> list[object]:
        """Names of the blocks; those of the common head are the same in every prompt."""
        return [(block if block < SHARED_BLOCKS else (self.prompt, block)) for block in range(self.first, self.stop)]

    def ids(self, side: Side, kind: str, *, whole: bool = False) -> tuple[Any, Any]:
        values: list[Any] = PROMPTS[self.prompt] if kind == "tokens" else hashes_of(PROMPTS[self.prompt])
        sequence = side.ids(kind, values, fresh=self.fresh)
        extra = 0 if whole or kind == "hashes" else self.extra_tokens
        prefix = sequence[: self.first * BLOCK_TOKENS]
        query = sequence[self.first * BLOCK_TOKENS : self.stop * BLOCK_TOKENS + extra]
        return (None if self.none_prefix and not self.first else prefix), query

    def call(self, side: Side, kind: str, name: str, *handle: Any, whole: bool = False) -> Any:
        prefix, query = self.ids(side, kind, whole=whole)
        key = side.package.KVCacheKey(prefix, query) if self.form.startswith("key") else None
        args, kwargs = {
            "pair": ((prefix, query, *handle), {}),
            "query named": ((prefix,), {"query": query}),
            "both named": ((), {"prefix": prefix, "query": query}),
            "key": ((key, *handle), {}),
            "key named": ((), {"cache_key": key}),
        }[self.form]
        if handle and self.form not in ("pair", "key"):
            kwargs |= {"kv_tensors": handle[0]}
        return getattr(side.cache, name)(*args, **kwargs)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    first = draw(st.integers(0, N_BLOCKS - 1))
    stop = draw(st.integers(first, N_BLOCKS))
    return Run(
        prompt=draw(st.integers(0, len(PROMPTS) - 1)),
        first=draw(st.sampled_from([0, first])),
        stop=stop,
        extra_tokens=draw(st.integers(0, BLOCK_TOKENS - 1)) if stop < N_BLOCKS else 0,
        none_prefix=draw(st.booleans()),
        fresh=draw(st.booleans()),
        form=draw(st.sampled_from(FORMS)),
    )


@dataclass
class Script:
    """A sequence of calls under way: what is held, and the calls that can be made.

    Attributes:
        pair: Who is called.
        kind: Which keys.
        roomy: Whether a handle to read into may have more blocks than the query, and what is behind the
            delivered ones is compared.
        gets: Whether ``get`` is called; AIBrix's is wrong with L1 and a second tier.
        holes: Whether blocks may be missing before stored ones; AIBrix's file tier then delivers garbage.
        held: Bytes and handles, one per library, that were acquired and not released.
    """

    pair: Pair
    kind: str
    roomy: bool = True
    gets: bool = True
    holes: bool = True
    held: list[tuple[list[bytes], list[Any]]] = field(default_factory=list)

    def exists(self, run: Run, _: int) -> None:
        self.pair.same(lambda side: run.call(side, self.kind, "exists"))

    def acquire(self, run: Run, keep: int) -> None:
        statuses: list[Any] = []

        def call(side: Side) -> Any:
            statuses.append(run.call(side, self.kind, "acquire"))
            return statuses[-1]

        if not self.pair.same(call).is_ok():
            return
        n_tokens, handle = statuses[1].get()
        blocks = [raw(tensor) for tensor in handle.to_tensors()]
        assert blocks == self.pair.ours.named(*run.labels()[: n_tokens // BLOCK_TOKENS])
        self.held.append((blocks, [status.get()[1] for status in statuses]))
        if keep % 2:
            self.release(run, keep)

    def release(self, _: Run, which: int) -> None:
        """Give a held handle back; its bytes were what they were, whatever happened meanwhile."""
        if not self.held:
            return
        blocks, handles = self.held.pop(which % len(self.held))
        for side, handle in zip(self.pair.sides, handles, strict=True):
            assert [raw(tensor) for tensor in handle.to_tensors()] == blocks, side.name
            if which % 3 == 0:
                handle.truncate(1)
            handle.release()

    def get(self, run: Run, room: int) -> None:
        n_blocks = 1 + room % (N_BLOCKS + 1)
        if not self.roomy:
            n_blocks = min(n_blocks, run.n_blocks)
        if not self.gets or not n_blocks:
            return

        def call(side: Side) -> Any:
            memory = torch.full((n_blocks, *side.cache.block_shape), -1, dtype=side.cache.block_dtype)
            spec, blocks = side.cache.block_spec, [memory[i : i + 1] for i in range(n_blocks)]
            handle = side.package.MemoryRegionKVCacheHandle.create(blocks, spec, [(i, 0) for i in range(n_blocks)])
            status = run.call(side, self.kind, "get", handle)
            if not self.roomy:  # AIBrix writes behind what it reports
                memory = memory[: (status.value or 0) // BLOCK_TOKENS]
            return status, memory

        self.pair.same(call)

    def put(self, run: Run, which: int) -> None:
        """Store; sometimes from the caller's memory, sometimes one block less than reserved."""
        if not self.holes:
            run = replace(run, first=0)
        if not run.n_blocks:
            return

        def call(side: Side) -> Any:
            labels, nbytes = run.labels(), side.cache.block_nbytes
            if which % 3 == 0:
                memory = torch.stack([block_bytes(label, nbytes) for label in labels]).view(side.cache.block_dtype)
                blocks = list(memory.view(-1, 1, *side.cache.block_shape))
                handle = side.package.MemoryRegionKVCacheHandle.create(
                    blocks, side.cache.block_spec, [(i, 0) for i in range(len(blocks))]
                )
                return run.call(side, self.kind, "put", handle, whole=True)
            handle = run.call(side, self.kind, "allocate_for", whole=True).get()
            assert len(handle) == run.n_blocks
            for tensor, label in zip(handle.to_tensors(), labels, strict=True):
                tensor.view(torch.uint8).reshape(-1).copy_(block_bytes(label, nbytes))
            if which % 3 == 1 or run.n_blocks == 1:
                return run.call(side, self.kind, "put", handle, whole=True)
            handle.truncate(run.n_blocks - 1)
            prefix, query = run.ids(side, self.kind, whole=True)
            return side.cache.put(prefix, query[: (run.n_blocks - 1) * BLOCK_TOKENS], handle)

        self.pair.same(call)
        self.pair.same(lambda side: side.cache.flush())

    def put_wrong_size(self, run: Run, _: int) -> None:
        if run.n_blocks < 2:
            return

        def call(side: Side) -> Any:
            prefix, query = run.ids(side, self.kind, whole=True)
            handle = side.cache.allocate_for(prefix, query).get()
            return side.cache.put(prefix, query[:BLOCK_TOKENS], handle), [r.ref_count for r in handle.memory_regions]

        self.pair.same(call)

    def reserve_and_release(self, run: Run, _: int) -> None:
        def call(side: Side) -> Any:
            status = run.call(side, self.kind, "allocate_for")
            if not status.is_ok():
                return status
            handle = status.get()
            shapes = [(tuple(t.shape), str(t.dtype)) for t in handle.to_tensors()]
            handle.release()
            return shapes, [region.ref_count for region in handle.memory_regions]

        self.pair.same(call)

    def delete(self, run: Run, _: int) -> None:
        if not self.holes:
            run = replace(run, first=max(run.first, SHARED_BLOCKS), stop=N_BLOCKS, extra_tokens=0)
        self.pair.same(lambda side: run.call(side, self.kind, "delete"))

    def prefetch(self, run: Run, _: int) -> None:
        self.pair.same(lambda side: run.call(side, self.kind, "prefetch"))

    def misaligned_prefix(self, run: Run, _: int) -> None:
        """A prefix that is not whole blocks is INVALID; hashes cannot be cut so."""
        if self.kind == "hashes" or run.stop == N_BLOCKS:
            return

        def call(side: Side) -> Any:
            sequence = side.ids("tokens", PROMPTS[run.prompt])
            prefix, query = sequence[: run.stop * BLOCK_TOKENS + 2], sequence[run.stop * BLOCK_TOKENS + 2 :]
            return [getattr(side.cache, name)(prefix, query) for name in ("exists", "acquire", "delete")]

        self.pair.same(call)

    def chunks(self, run: Run, _: int) -> None:
        """Cut as both cut; which chunk is next is a listed difference."""

        def call(side: Side) -> Any:
            return [
                (before, chunk, whole)
                for before, chunk, _, whole in side.cache.cache_chunk_keys(*run.ids(side, self.kind))
            ]

        self.pair.same(call)

    def end(self) -> None:
        while self.held:
            self.release(Run(0, 0, 0, 0, none_prefix=True, fresh=False, form="pair"), 0)


CALLS: dict[str, Callable[[Script, Run, int], None]] = {
    name: call for name, call in vars(Script).items() if callable(call) and name[0] != "_" and name != "end"
}

"""How blocks come in from media that the tier's threads read: whole calls, places, chunks, runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, fetch
from kvstore.backend import Backend, Place
from kvstore.l2 import landing
from kvstore.memory_backend import MemoryBackend
from kvstore.types import Call, ReadStatus
from tests import doubles
from tests.support import KeyKind, MakeKey, OpenDouble, blocks_of, key_of, same_bytes
from tests.unit.cache.reading import free_slots, l1_of, served_by, stored

POOLED = [doubles.PooledBackend, doubles.PlacingBackend, doubles.ParallelBackend, doubles.PackingBackend]
PAGE = 4096


@pytest.mark.parametrize("codec", ["none", "planes"])
@pytest.mark.parametrize("l1", [{"enabled": False}, {"capacity": "4MiB"}], ids=["no L1", "L1"])
@pytest.mark.parametrize("backend", POOLED)
def test_every_way_in_gives_the_same_bytes(
    open_double: OpenDouble,
    spec: BlockSpec,
    make_key: MakeKey,
    backend: Callable[[], Backend],
    l1: dict[str, Any],
    codec: str,
) -> None:
    cache = open_double(backend, l1=l1, codec=codec, queue="8MiB")
    key = make_key(37)
    blocks = torch.randn((37, *spec.shape), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    stored(cache, key, blocks)
    out, each = torch.zeros_like(blocks), torch.zeros_like(blocks)

    assert cache.get_each(key, each) == [BlockStatus.DELIVERED] * 37
    assert cache.get(key, out) == 37
    assert same_bytes(out, blocks)
    assert same_bytes(each, blocks)
    counters = cache.stats().tiers[0].counters
    assert (counters.lookups, counters.hits, counters.misses) == (74, 74, 0)
    if l1.get("enabled", True):
        assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]
        assert free_slots(l1_of(cache)) == l1_of(cache).pool.n_slots


# -- whole calls


def test_a_medium_with_threads_of_its_own_gets_a_read_whole(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    whole, shared = doubles.ParallelBackend(), doubles.PlacingBackend()
    key, blocks = make_key(20), blocks_of(spec, 20)
    for medium in (whole, shared):
        cache = open_double(lambda medium=medium: medium, workers=4)
        stored(cache, key, blocks)
        assert cache.get(key, torch.zeros_like(blocks)) == 20

    assert [len(names) for names, _ in whole.reads] == [20]
    assert sorted(len(names) for names, _ in shared.reads) == [5, 5, 5, 5]


# -- chunks


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, spec: BlockSpec) -> int:
    """Chunks of four blocks, and one block at first."""
    monkeypatch.setattr(fetch, "_CHUNK_BYTES", 4 * spec.nbytes)
    monkeypatch.setattr(fetch, "_FIRST_CHUNK_BYTES", spec.nbytes)
    return 4


class Holding(doubles.ParallelBackend):
    """Answers no read before so many are under way."""

    together = threading.Barrier(1)

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        if len(self.reads) < self.together.parties:
            self.reads.append((list(names), call))
            self.together.wait(10)
            return [self.read_one(i, name, place, done) for i, name in enumerate(names)]
        return super().read_many(names, place, done, call)


@pytest.mark.parametrize("l1", [{"enabled": False}, {"capacity": "4MiB"}], ids=["no L1", "L1"])
def test_the_next_chunks_are_read_while_one_is_copied(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, small_chunks: int, l1: dict[str, Any]
) -> None:
    medium = Holding()
    cache = open_double(lambda: medium, l1=l1)
    key, blocks = make_key(31), blocks_of(spec, 31)
    stored(cache, key, blocks)
    medium.together = threading.Barrier(4)
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 31

    assert same_bytes(out, blocks)
    assert sorted(len(names) for names, _ in medium.reads) == [1, 2, *[small_chunks] * 7]


def test_a_long_read_uses_staging_memory_of_a_few_chunks(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, small_chunks: int
) -> None:
    cache = open_double(doubles.ParallelBackend)
    key, blocks = make_key(120), blocks_of(spec, 120)
    stored(cache, key, blocks)
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 120
    assert cache.get_each(key, out) == [BlockStatus.DELIVERED] * 120

    assert cache._state is not None
    frames = cache._state.stack.tiers[0].reader.frames
    assert len(frames._free) <= landing._PIECE_BYTES // spec.nbytes, "all of them are back, and no more were made"


def test_a_hole_ends_the_prefix_and_reads_behind_it_give_their_slots_back(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, small_chunks: int
) -> None:
    del small_chunks
    medium = doubles.PackingBackend()  # is not asked for existence first
    cache = open_double(lambda: medium, l1={"capacity": "8MiB"})
    key, blocks = make_key(64), blocks_of(spec, 64)
    stored(cache, key, blocks)
    hole = next(n for n in medium._records if n.endswith(key[20]))
    del medium._records[hole]
    out = torch.full_like(blocks, 7.0)

    assert cache.get(key, out) == 20

    assert same_bytes(out[:20], blocks[:20])
    assert same_bytes(out[20:], torch.full_like(blocks, 7.0)[20:])
    l1, deadline = l1_of(cache), time.monotonic() + 10
    while free_slots(l1) < l1.pool.n_slots and time.monotonic() < deadline:
        time.sleep(0.01)  # reads behind the hole keep theirs until they end
    assert free_slots(l1) == l1.pool.n_slots
    assert cache.stats().tiers[0].counters.late == 0


# -- what remote media are asked


def test_a_stored_prompt_is_read_without_asking_for_existence(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    medium = doubles.PackingBackend()
    cache = open_double(lambda: medium)
    key, blocks = make_key(40), blocks_of(spec, 40)
    stored(cache, key, blocks)
    medium.calls.clear()

    assert cache.get(key, torch.zeros_like(blocks)) == 40

    assert [(method, len(names)) for method, names, _ in medium.calls] == [("get_many", 16), ("get_many", 24)]


def test_a_prompt_that_was_never_stored_costs_one_small_read(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    medium = doubles.PackingBackend()
    cache = open_double(lambda: medium, l1={"capacity": "2MiB"})
    held = make_key(8, seed=9)
    cache.put(held, blocks_of(spec, 8))
    cache.flush(10)
    medium.calls.clear()

    assert cache.get(make_key(600), torch.zeros((600, *spec.shape), dtype=torch.bfloat16)) == 0

    assert [(method, len(names)) for method, names, _ in medium.calls] == [("get_many", 16)]
    assert cache.lookup(held).by_tier["l1"] == 8, "nothing was evicted for it"


def test_calls_tell_packing_media_the_whole_sequence(open_double: OpenDouble, spec: BlockSpec) -> None:
    medium = doubles.PackingBackend()
    cache = open_double(lambda: medium)
    key, blocks = key_of("tokens", 40), blocks_of(spec, 40)
    stored(cache, key, blocks)
    medium.calls.clear()
    tail, out = key.suffix(5), torch.zeros_like(blocks[5:])

    cache.lookup(tail)
    cache.contains_each(tail)
    cache.get(tail, out)
    cache.get_each(tail, out)
    cache.delete(tail)

    assert {method for method, _, _ in medium.calls} == {"get_many", "exists_many", "delete_many"}
    for method, names, run in medium.calls:
        assert run is not None, method
        assert run.start == 5
        assert [name[-32:] for name in run.names] == list(tail)
        assert set(names) <= set(run.names)


def test_no_pack_is_asked_for_in_two_calls(
    open_double: OpenDouble, spec: BlockSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_CHUNK_BYTES", 20 * spec.nbytes)
    medium = doubles.PackingBackend()
    cache = open_double(lambda: medium)
    key, blocks = key_of("tokens", 100), blocks_of(spec, 100)
    stored(cache, key, blocks)
    medium.calls.clear()

    for expected in ([11, 32, 32, 20], [27, 32, 32, 4]):  # at first only one pack is risked
        assert cache.get(key.suffix(5), torch.zeros_like(blocks[5:])) == 95
        assert sorted(len(names) for _, names, _ in medium.calls) == sorted(expected)
        assert all((run.start + run.names.index(names[0])) % 16 in (0, 5) for _, names, run in medium.calls if run)
        medium.calls.clear()


@pytest.mark.parametrize("before", ["lookup", "get"])
def test_a_prompt_that_is_known_to_be_there_is_read_at_once(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, before: str
) -> None:
    medium = doubles.PackingBackend()
    cache = open_double(lambda: medium)
    key, blocks = make_key(40), blocks_of(spec, 40)
    stored(cache, key[:35], blocks[:35])
    out = torch.zeros_like(blocks)
    assert (cache.lookup(key).blocks if before == "lookup" else cache.get(key, out)) == 35
    medium.calls.clear()

    assert cache.get(key, out) == 35

    assert sorted(len(names) for _, names, _ in medium.calls) == [5, 35], "and one look at what may follow"
    stored(cache, key, blocks)
    assert cache.get(key, out) == 40
    assert same_bytes(out, blocks)


@pytest.mark.parametrize("kind", ["tokens", "block-hashes"])
def test_no_sequence_is_told_where_it_is_not_known_or_not_wanted(
    open_double: OpenDouble, spec: BlockSpec, kind: KeyKind
) -> None:
    class Plain(doubles.PackingBackend):
        capabilities = doubles.PooledBackend.capabilities

    for factory in (doubles.PackingBackend, Plain):
        medium = factory()
        cache = open_double(lambda medium=medium: medium)
        key, blocks = key_of(kind, 20), blocks_of(spec, 20)
        stored(cache, key, blocks)
        medium.calls.clear()

        cache.lookup(key)
        assert cache.get(key, torch.zeros_like(blocks)) == 20
        cache.delete(key)

        known = factory is doubles.PackingBackend and kind == "tokens"
        assert len(medium.calls) >= 3
        assert all((run is not None) == known for _, _, run in medium.calls)


# -- what a call says at its end


@pytest.mark.parametrize("read", ["get", "get_each", "acquire"])
@pytest.mark.parametrize("backend", [MemoryBackend, *POOLED])
def test_a_call_knows_which_copies_were_damaged(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, backend: Callable[[], MemoryBackend], read: str
) -> None:
    above, below = backend(), MemoryBackend()
    cache = open_double(lambda: above, lambda: below, l1={"capacity": "4MiB"})
    key, blocks = make_key(12), blocks_of(spec, 12)
    stored(cache, key, blocks)
    name = next(n for n in above._records if n.endswith(key[5]))
    above._records[name] = (above._records[name][0][:-1] + b"\x55", 0.0)
    out = torch.zeros_like(blocks)
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: cache.get(key, out),
        "get_each": lambda: cache.get_each(key, out),
        "acquire": lambda: cache.acquire(key).release(),
    }

    served = served_by(cache, calls[read])

    tiers = [tier.name for tier in cache.config.l2]
    assert served.corrupt == {tiers[0]: {5}}
    assert 5 in served.blocks(tiers[1])
    assert served.every() == list(range(12))
    assert (served.rows is None) == (read == "acquire")

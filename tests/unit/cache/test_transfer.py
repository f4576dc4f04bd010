"""Gets in the background: the same answers, and out is borrowed until they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, ClosedError, DeadlineError, KVCache, PagedBlocks, SpecMismatchError
from kvstore.transfer import Transfer, Transfers
from tests import doubles
from tests.support import OpenCache, OpenDouble, blocks_of, key_of, same_bytes

KEY = key_of("tokens", 6)


class Gated:
    """A cache whose only tier answers reads while a gate is open."""

    def __init__(self, open_double: OpenDouble, spec: BlockSpec) -> None:
        self.backend = doubles.GatedBackend()
        self.cache: KVCache = open_double(lambda: self.backend, deadline=20.0)
        self.blocks = blocks_of(spec, 6)
        self.out = torch.zeros_like(self.blocks)
        self.cache.put(KEY, self.blocks)
        self.cache.flush(10)
        self.backend.reads = 0
        self.backend.gate.clear()

    def begin(self) -> Transfer:
        transfer = self.cache.submit_get(KEY, self.out)
        until = time.monotonic() + 10
        while not self.backend.reads and time.monotonic() < until:
            time.sleep(0.001)
        assert self.backend.reads
        return transfer


@pytest.fixture
def gated(open_double: OpenDouble, spec: BlockSpec) -> Iterator[Gated]:
    gate = Gated(open_double, spec)
    yield gate
    gate.backend.gate.set()


@pytest.fixture
def cache(open_cache: OpenCache, spec: BlockSpec) -> KVCache:
    cache = open_cache()
    cache.put(KEY, blocks_of(spec, 6))
    return cache


def test_a_transfer_delivers_what_get_does(cache: KVCache, spec: BlockSpec) -> None:
    cache.delete(KEY[4:5])
    blocks, out = blocks_of(spec, 6), torch.zeros(6, *spec.shape, dtype=torch.bfloat16)
    before = cache.stats().cache

    transfer = cache.submit_get(KEY, out)
    assert transfer.wait(10) == 4
    assert transfer.poll()
    assert transfer.statuses == [BlockStatus.DELIVERED] * 4 + [BlockStatus.ABSENT] * 2
    assert same_bytes(out[:4], blocks[:4])
    assert not out[4:].view(torch.uint8).any()
    after = cache.stats().cache
    assert (after.hits - before.hits, after.misses - before.misses) == (4, 2)


def test_each_delivers_what_get_each_does(cache: KVCache, spec: BlockSpec) -> None:
    cache.delete(KEY[2:3])
    blocks, out = blocks_of(spec, 6), torch.zeros(6, *spec.shape, dtype=torch.bfloat16)
    transfer = cache.submit_get(KEY, out, each=True)
    assert transfer.wait(10) == 5
    assert [i for i, s in enumerate(transfer.statuses) if s is not BlockStatus.DELIVERED] == [2]
    assert same_bytes(out[3:], blocks[3:])


def test_pages_can_be_the_destination(cache: KVCache, spec: BlockSpec) -> None:
    layers = [torch.zeros(9, *spec.shape[1:], dtype=torch.bfloat16) for _ in range(spec.layers)]
    assert cache.submit_get(KEY, PagedBlocks(layers, [8, 1, 7, 2, 6, 3])).wait(10) == 6
    assert same_bytes(torch.stack([layer[8] for layer in layers]), blocks_of(spec, 6)[0])


def test_what_does_not_fit_is_refused_at_once(cache: KVCache) -> None:
    with pytest.raises(SpecMismatchError, match="out has shape"):
        _ = cache.submit_get(KEY, torch.zeros(3))


def test_a_timeout_ends_the_waiting_only(gated: Gated) -> None:
    transfer = gated.begin()
    assert not transfer.poll()
    with pytest.raises(DeadlineError, match=r"6 blocks has not ended after 0\.01 s and still borrows its out"):
        transfer.wait(0.01)
    assert "under way" in repr(transfer)
    gated.backend.gate.set()
    assert transfer.wait(10) == 6
    assert same_bytes(gated.out, gated.blocks)
    assert "ended" in repr(transfer)


def test_one_that_has_not_begun_is_cancelled_at_once() -> None:
    gate, transfers = threading.Event(), Transfers("test")

    def work(_: threading.Event) -> list[BlockStatus]:
        gate.wait(30)
        return [BlockStatus.DELIVERED]

    running = [transfers.submit(1, work) for _ in range(4)]
    waiting = transfers.submit(2, work)
    assert waiting.cancel()
    assert waiting.poll()
    assert not waiting.cancel()
    assert waiting.wait(0) == 0
    assert waiting.statuses == [BlockStatus.ABSENT] * 2
    gate.set()
    assert [transfer.wait(10) for transfer in running] == [1] * 4
    transfers.close()


def test_one_under_way_stops_early_and_keeps_out_until_then(gated: Gated) -> None:
    transfer = gated.begin()
    assert transfer.cancel()
    assert not transfer.poll()
    gated.backend.gate.set()
    delivered = transfer.wait(10)
    assert same_bytes(gated.out[:delivered], gated.blocks[:delivered])
    assert not gated.out[delivered:].view(torch.uint8).any()


def test_close_cancels_and_waits_a_moment(gated: Gated) -> None:
    transfer = gated.begin()
    begin = time.monotonic()
    gated.cache.close()
    assert time.monotonic() - begin < 8
    gated.backend.gate.set()
    with contextlib.suppress(ClosedError):
        transfer.wait(10)
    assert transfer.poll()
    with pytest.raises(ClosedError):
        _ = gated.cache.submit_get(KEY, gated.out)


def test_an_error_reaches_whoever_waits() -> None:
    transfers = Transfers("test")

    def broken(_: threading.Event) -> list[BlockStatus]:
        raise ZeroDivisionError

    transfer = transfers.submit(1, broken)
    with pytest.raises(ZeroDivisionError):
        transfer.wait(10)
    with pytest.raises(ZeroDivisionError):
        _ = transfer.statuses
    transfers.close()


def test_a_transfer_can_be_awaited(cache: KVCache, spec: BlockSpec) -> None:
    out = torch.zeros(6, *spec.shape, dtype=torch.bfloat16)

    async def two() -> list[int]:
        first = cache.submit_get(KEY, out)
        return [await first, await first]

    assert asyncio.run(two()) == [6, 6]


def test_cancelling_the_awaiting_task_cancels_the_transfer(gated: Gated) -> None:
    transfer = gated.begin()

    async def give_up() -> None:
        task = asyncio.ensure_future(_awaited(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert not transfer.poll()
    assert "cancelling" in repr(transfer)
    gated.backend.gate.set()
    transfer.wait(10)
    assert transfer.poll()


async def _awaited(transfer: Transfer) -> int:
    return await transfer


def test_a_dropped_transfer_runs_on_and_then_lets_go_of_out(gated: Gated, spec: BlockSpec) -> None:
    out = torch.zeros_like(gated.out)
    alive = weakref.ref(out)
    _ = gated.cache.submit_get(KEY, out)
    del out, _
    gc.collect()
    until = time.monotonic() + 10
    while not gated.backend.reads and time.monotonic() < until:
        time.sleep(0.001)
    assert alive() is None or gated.backend.reads
    gated.backend.gate.set()
    while gated.cache.stats().cache.hits < 6 and time.monotonic() < until:
        time.sleep(0.001)
    assert gated.cache.stats().cache.hits == 6


def test_many_at_once(cache: KVCache, spec: BlockSpec) -> None:
    blocks = blocks_of(spec, 6)

    def one(_: int) -> bool:
        out = torch.zeros_like(blocks)
        return cache.submit_get(KEY, out).wait(20) == 6 and same_bytes(out, blocks)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(60)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_forked_child_it_has_ended(gated: Gated) -> None:
    transfer = gated.begin()
    child = os.fork()
    if not child:
        code = 1
        try:
            assert transfer.poll()
            try:
                transfer.wait(0)
            except ClosedError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gated.backend.gate.set()
    assert transfer.wait(10) == 6

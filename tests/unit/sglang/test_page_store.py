"""Pages of host pools in and out of real tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_sglang.hits import ALL_PAGES, TRAILING_PAGES, PoolQuery
from kvstore_sglang.identity import Model, Place
from kvstore_sglang.options import Options
from kvstore_sglang.page_store import PageRun, PageStore
from kvstore_sglang.pool_store import PageKeys

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.engine_hashes import sglang_page_hashes
from kvstore.engines.store_config import load_store_config
from kvstore.errors import ConfigError
from kvstore.plugins import Registry
from tests.unit.sglang.pools import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    LogicalPool,
    LopsidedPool,
    MhaPool,
    MlaPool,
    StatePool,
    bytes_of,
    hashes,
    pages,
    scramble,
    wipe,
)

Opener = Callable[..., PageStore]

POOLS: dict[str, Callable[[], Any]] = {
    "page_first": lambda: MhaPool("page_first"),
    "layer_first": lambda: MhaPool("layer_first"),
    "page_head": lambda: MhaPool("page_head"),
    "mla": MlaPool,
    "lopsided": LopsidedPool,
}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"l2": [{"backend": "lmdb", "path": str(tmp_path / "db"), "capacity": "32MiB"}]}


@pytest.fixture
def open_store(config: dict[str, Any]) -> Iterator[Opener]:
    opened: list[PageStore] = []

    def make(pool: Any = None, *, place: Place | None = None, **options: Any) -> PageStore:
        registry = Registry.discover()
        read = Options.read({"config": config, **options})
        model = Model(name="demo", revision=read.revision or "1")
        store = PageStore(load_store_config(read.config, registry), registry, place or Place(), model, read.salt)
        opened.append(store)
        if pool is not None:
            store.add_pool("kv", pool)
        return store

    yield make
    for store in opened:
        store.close()


def run(names: list[str], *numbers: int, each: int = PAGE, before: list[str] | None = None) -> PageRun:
    return PageRun(PageKeys(names, before), pages(*numbers, each=each))


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_bit_for_bit_in_another_process_worth_of_store(name: str, open_store: Opener) -> None:
    pool = POOLS[name]()
    before = bytes_of(pool)
    store = open_store(pool)
    assert store.save("kv", run(hashes(8), *range(8))) == [True] * 8
    store.close()
    wipe(pool)
    fresh = open_store(pool)
    assert fresh.count("kv", PageKeys(hashes(9))) == 8
    assert fresh.load("kv", run(hashes(8), *range(8))) == [True] * 8
    assert bytes_of(pool) == before


def test_a_partial_hit_gives_the_leading_pages_and_touches_nothing_else(open_store: Opener) -> None:
    pool = MhaPool()
    store = open_store(pool)
    store.save("kv", run(hashes(2), 0, 1))
    store.save("kv", run(hashes(1, first=3), 3))
    store.flush(10)
    kept = [pool.get_data_page(number * PAGE).view(torch.uint8).clone() for number in (0, 1)]
    pool.kv_buffer.fill_(7)
    assert store.load("kv", run(hashes(4), 4, 5, 6, 7)) == [True, True, False, False]
    assert [pool.get_data_page(n * PAGE).view(torch.uint8).equal(k) for n, k in zip((4, 5), kept, strict=True)] == [
        True,
        True,
    ]
    assert pool.kv_buffer[:, 6 * PAGE :].eq(7).all()
    assert pool.kv_buffer[:, : 4 * PAGE].eq(7).all()
    assert store.count("kv", PageKeys(hashes(4))) == 2
    assert store.each("kv", PageKeys(hashes(4))) == [True, True, False, True]


def test_the_generic_and_the_page_interface_read_each_others_pages(open_store: Opener) -> None:
    pool = MhaPool("layer_first")
    store = open_store(pool)
    flat = [pool.get_data_page(number * PAGE) for number in range(3)]
    assert store.set(hashes(2), flat[:2])
    assert store.save("kv", run(hashes(1, first=2), 2)) == [True]
    store.flush(10)
    got = store.get(hashes(4), [pool.get_dummy_flat_data_page() for _ in range(4)])
    assert [None if page is None else page.view(torch.uint8).equal(flat[i].view(torch.uint8)) for i, page in
            enumerate(got)] == [True, True, True, None]  # fmt: skip
    wipe(pool)
    assert store.load("kv", run(hashes(2), 5, 6)) == [True, True]
    assert pool.get_data_page(6 * PAGE).view(torch.uint8).equal(flat[1].view(torch.uint8))


def test_a_page_without_a_target_comes_in_a_tensor_of_its_own(open_store: Opener) -> None:
    pool = MhaPool()
    store = open_store(pool)
    page = pool.get_data_page(0)
    assert store.set(hashes(1), [page])
    store.flush(10)
    (got,) = store.get(hashes(1), None)
    assert got is not None
    assert (got.dtype, got.shape) == (page.dtype, page.shape)
    assert got.view(torch.uint8).equal(page.view(torch.uint8))


def test_a_target_with_gaps_is_filled_too(open_store: Opener) -> None:
    pool = MhaPool()
    store = open_store(pool)
    page = pool.get_data_page(0)
    store.set(hashes(1), [page])
    store.flush(10)
    target = torch.zeros(len(page) * 2, dtype=page.dtype)[::2]
    (got,) = store.get(hashes(1), [target])
    assert got is target
    assert target.contiguous().view(torch.uint8).equal(page.view(torch.uint8))


def test_tensors_that_are_no_pages_are_refused(open_store: Opener) -> None:
    store = open_store(MhaPool())
    with pytest.raises(ValueError, match="1 tensors for 2 keys"):
        store.get(hashes(2), [torch.zeros(1)])
    with pytest.raises(ValueError, match="a page of 4 bytes; expected"):
        store.set(hashes(1), [torch.zeros(1)])


def test_before_a_pool_is_known_everything_is_a_miss(open_store: Opener) -> None:
    store = open_store()
    assert store.count("kv", PageKeys(hashes(2))) == 0
    assert store.each("kv", PageKeys(hashes(2))) == [False, False]
    assert store.load("kv", run(hashes(1), 0)) == store.save("kv", run(hashes(1), 0)) == [False]
    assert store.get(hashes(2), None) == [None, None]
    assert not store.set(hashes(1), [torch.zeros(1)])
    assert store.stats() == {}
    store.clear()
    store.flush(1)


def test_a_closed_store_misses_and_does_not_raise(open_store: Opener) -> None:
    pool = MhaPool()
    store = open_store(pool)
    page = pool.get_data_page(0)
    store.set(hashes(1), [page])
    store.close()
    store.close()
    assert store.count("kv", PageKeys(hashes(1))) == 0
    assert store.each("kv", PageKeys(hashes(1))) == [False]
    assert store.load("kv", run(hashes(1), 0)) == store.save("kv", run(hashes(1), 0)) == [False]
    assert store.get(hashes(1), None) == [None]
    assert not store.set(hashes(1), [page])
    with pytest.raises(ConfigError, match="after close"):
        store.add_pool("kv", MhaPool())


def test_empty_batches_are_empty_answers(open_store: Opener) -> None:
    store = open_store(MhaPool())
    assert store.count("kv", PageKeys([])) == 0
    assert store.load("kv", run([])) == store.save("kv", run([])) == []
    assert store.get([], []) == []
    assert store.set([], [])
    assert store.restorable(PageKeys([]), []).kv_pages == 0


def test_indices_that_do_not_fit_the_keys_move_nothing_and_are_told_once(
    open_store: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MhaPool()
    store = open_store(pool)
    before = bytes_of(pool)
    for indices in (None, pages(0), pages(0, 1, 2)):
        assert store.save("kv", PageRun(PageKeys(hashes(2)), indices)) == [False, False]
        assert store.load("kv", PageRun(PageKeys(hashes(2)), indices)) == [False, False]
    assert bytes_of(pool) == before
    assert [r.getMessage() for r in caplog.records if "host indices" in r.getMessage()] == [
        "pool 'kv': no host indices for 2 pages, expected 8; such transfers move nothing (told once per pool)"
    ]


def test_other_weights_ranks_salts_and_layouts_see_nothing(open_store: Opener) -> None:
    first = open_store(MhaPool())
    first.save("kv", run(hashes(1), 0))
    first.flush(10)
    others = [
        open_store(MhaPool(), revision="2"),
        open_store(MhaPool(), place=Place(tp_rank=0, tp_size=2)),
        open_store(MhaPool(), salt="team"),
        open_store(MhaPool("page_first_direct")),
        open_store(MhaPool(dtype=torch.float16)),
    ]
    assert [store.count("kv", PageKeys(hashes(1))) for store in others] == [0] * 5
    assert open_store(MhaPool()).count("kv", PageKeys(hashes(1))) == 1


def test_replicas_read_what_the_writer_wrote_and_write_nothing(open_store: Opener) -> None:
    writer = open_store(MlaPool(), place=Place(tp_rank=0, tp_size=2, replicated=True, is_writer=True))
    pool = MlaPool()
    reader = open_store(pool, place=Place(tp_rank=1, tp_size=2, replicated=True, is_writer=False))
    assert reader.save("kv", run(hashes(2), 0, 1)) == [True, True]  # left to the writer
    reader.flush(10)
    assert writer.count("kv", PageKeys(hashes(2))) == 0
    writer.save("kv", run(hashes(2), 0, 1))
    writer.flush(10)
    assert reader.load("kv", run(hashes(2), 0, 1)) == [True, True]


def test_clear_forgets_the_pages_of_every_pool(open_store: Opener) -> None:
    store = open_store(MhaPool())
    store.add_pool("mamba", StatePool())
    store.save("kv", run(hashes(2), 0, 1))
    store.save("mamba", run(hashes(1), 0, each=1))
    store.flush(10)
    assert store.count("mamba", PageKeys(hashes(1))) == 1
    store.clear()
    assert store.count("kv", PageKeys(hashes(2))) == store.count("mamba", PageKeys(hashes(1))) == 0


def test_a_hybrid_model_is_restored_to_where_its_state_was_stored(open_store: Opener) -> None:
    kv, states, swa = MhaPool(), StatePool(), MhaPool("page_first_direct")
    store = open_store(kv)
    for name, pool in (("kv", kv), ("mamba", states), ("swa", swa)):
        store.add_pool(name, pool)  # the anchor is registered twice by SGLang
    names = hashes(6)
    store.save("kv", run(names, *range(6)))
    store.save("mamba", run([names[3]], 2, each=1))
    store.save("swa", run(names[2:4], 2, 3))
    store.flush(10)
    before = states.memory[2].clone()
    queries = [PoolQuery("mamba", TRAILING_PAGES, ["x"]), PoolQuery("swa", TRAILING_PAGES, ["x", "x"])]
    found = store.restorable(PageKeys(names), queries)
    assert (found.kv_pages, found.by_pool, found.lengths) == (4, {"kv": 6, "mamba": 4, "swa": 4}, [4])
    wipe(states)
    assert store.load("mamba", run([names[3]], 5, each=1)) == [True]
    assert states.memory[5].equal(before)
    assert store.restorable(PageKeys(names), [PoolQuery("indexer", ALL_PAGES)]).kv_pages == 0  # never registered


def test_a_logical_anchor_leaves_the_decision_to_the_other_pools(open_store: Opener) -> None:
    store = open_store(LogicalPool())
    store.add_pool("c4", StatePool())
    names = hashes(3)
    assert store.save("kv", run(names, 0, 1, 2)) == store.load("kv", run(names, 0, 1, 2)) == [True] * 3
    store.save("c4", run(names[:2], 0, 1, each=1))
    store.flush(10)
    assert store.restorable(PageKeys(names), [PoolQuery("c4", ALL_PAGES)]).kv_pages == 2


def test_a_pool_before_the_kv_pool_is_refused(open_store: Opener) -> None:
    with pytest.raises(ConfigError, match="before the KV pool"):
        open_store().add_pool("mamba", StatePool())


def test_a_pool_that_is_registered_anew_takes_over(open_store: Opener) -> None:
    store = open_store(MhaPool())
    store.save("kv", run(hashes(1), 0))
    store.flush(10)
    pool = MhaPool()
    scramble(pool.kv_buffer, seed=9)
    store.add_pool("kv", pool)
    assert store.load("kv", run(hashes(1), 3)) == [True]
    assert pool.get_data_page(3 * PAGE).view(torch.uint8).equal(MhaPool().get_data_page(0).view(torch.uint8))


def test_a_plain_script_finds_pages_by_token_ids_and_the_other_way_round(
    open_store: Opener, config: dict[str, Any]
) -> None:
    pool = MhaPool()
    store = open_store(pool)
    names = sglang_page_hashes(range(1000, 1000 + 4 * PAGE), page_tokens=PAGE)
    store.save("kv", run(names[:2], 0, 1))
    store.flush(10)
    key = KVCacheKey.from_block_hashes(names, block_tokens=PAGE, chained=True)
    spec = BlockSpec(LAYERS, HEADS, DIM, PAGE, "bfloat16", layout="CNLD")
    with KVCache.open(config, spec=spec, namespace=Namespace(model="demo", revision="1")) as cache:
        out = torch.zeros(4, *spec.shape, dtype=torch.bfloat16)
        assert cache.get(key, out) == 2
        for number in (0, 1):
            assert out[number].flatten().view(torch.uint8).equal(pool.get_data_page(number * PAGE).view(torch.uint8))
        cache.put(key.suffix(2), out[:2])
        cache.flush(10)
    assert store.load("kv", run(names, 4, 5, 6, 7)) == [True] * 4
    assert pool.get_data_page(6 * PAGE).view(torch.uint8).equal(out[0].flatten().view(torch.uint8))


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    """A page is 768 bytes and the queue holds two: a batch of eight goes in all the same."""
    registry = Registry.discover()
    tier = {"backend": "lmdb", "path": str(tmp_path / "db"), "capacity": "32MiB", "queue": "1536B"}
    config = load_store_config({"l2": [tier]}, registry)
    store = PageStore(config, registry, Place(), Model(name="demo", revision="1"))
    store.add_pool("kv", MhaPool())
    assert store.save("kv", run(hashes(8), *range(8))) == [True] * 8
    store.flush(10)
    assert store.count("kv", PageKeys(hashes(8))) == 8
    store.close()


def test_three_threads_never_mix_pages_up(open_store: Opener) -> None:
    """One asks, one reads, one writes, as SGLang's threads do; every page that is delivered is the right one."""
    source, target = MhaPool(n_pages=64), MhaPool(n_pages=64)
    writer, reader = open_store(source), open_store(target)
    names, stop = hashes(64), threading.Event()
    expected = [source.get_data_page(number * PAGE).view(torch.uint8) for number in range(64)]

    def write() -> int:
        return sum(sum(writer.save("kv", run(names[i : i + 8], *range(i, i + 8)))) for i in range(0, 64, 8))

    def ask() -> int:
        seen = 0
        while not stop.is_set():
            found = reader.count("kv", PageKeys(names))
            assert found >= seen
            seen = found
        return seen

    def read() -> int:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            hits = sum(reader.load("kv", run(names, *range(64))))
            for number in range(hits):
                assert target.get_data_page(number * PAGE).view(torch.uint8).equal(expected[number])
            if hits == 64:
                return hits
        return 0

    with ThreadPoolExecutor(3) as threads:
        asking, reading, writing = threads.submit(ask), threads.submit(read), threads.submit(write)
        try:
            assert (writing.result(30), reading.result(30)) == (64, 64)
        finally:
            stop.set()
        asking.result(30)


def test_what_was_moved_is_noted_until_it_is_asked_for(open_store: Opener) -> None:
    pool = MhaPool()
    store = open_store(pool)
    store.save("kv", run(hashes(3), 0, 1, 2))
    store.flush(10)
    store.load("kv", run(hashes(4), 0, 1, 2, 3))
    store.load("kv", run(hashes(1, first=9), 0))  # a miss moves nothing
    nbytes = pool.get_data_page(0).nbytes
    loads, saves = store.transfers.drain()
    assert [(t.n_pages, t.nbytes) for t in loads + saves] == [(3, 3 * nbytes)] * 2
    assert all(t.gigabytes_per_s > 0 for t in loads + saves)
    assert store.transfers.drain() == ([], [])


def test_counters_are_those_of_each_pool(open_store: Opener) -> None:
    store = open_store(MhaPool())
    store.add_pool("mamba", StatePool())
    store.save("kv", run(hashes(2), 0, 1))
    stats = store.stats()
    assert (stats["kv"]["cache"]["puts"], stats["mamba"]["cache"]["puts"]) == (2, 0)

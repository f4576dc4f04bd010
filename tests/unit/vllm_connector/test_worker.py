"""A worker's half: bytes go where they belong, and what went wrong is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvstore_vllm.connector_keys import prompt_key
from kvstore_vllm.connector_layout import BlockGeometry, LayerPages, layer_pages
from kvstore_vllm.connector_meta import BlockRun, StepPlan
from kvstore_vllm.connector_worker import WorkerHalf, WorkerSettings

from kvstore import KVCache
from tests.unit.vllm_connector.doubles import BLOCK_TOKENS, SPEC, OpenStore, Request, fill

N_BLOCKS = 12
NAMES = ("model.layers.0.attn", "model.layers.1.attn")
MakeWorker = Callable[..., WorkerHalf]


def engine_tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Pages ``[blocks, heads, tokens, content]`` of every bit pattern, with the strides of ``[B, N, H, C]``."""
    raw = torch.randint(0, 256, (2, N_BLOCKS, BLOCK_TOKENS, 2, 16), dtype=torch.uint8)
    return {name: raw[i].view(torch.bfloat16).to(device).transpose(1, 2) for i, name in enumerate(NAMES)}


def pages_of(tensors: dict[str, torch.Tensor]) -> LayerPages:
    return layer_pages(tensors, BlockGeometry(N_BLOCKS, BLOCK_TOKENS))


def block_bytes(tensors: dict[str, torch.Tensor], block: int) -> bytes:
    return b"".join(t[block].cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values())


def run_of(request: Request, start: int, block_ids: tuple[int, ...]) -> BlockRun:
    hashes = tuple(request.block_hashes[: start + len(block_ids)])
    return BlockRun(request.request_id, block_ids, start, hashes)


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    made: list[WorkerHalf] = []

    def make(cache: KVCache, tensors: dict[str, torch.Tensor], **settings: Any) -> WorkerHalf:
        made.append(WorkerHalf(cache, pages_of(tensors), WorkerSettings(**settings)))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def step(worker: WorkerHalf, plan: StepPlan) -> None:
    """What vLLM calls in one step, layer by layer."""
    worker.begin_step(plan)
    worker.start_loads(plan)
    for name in NAMES:
        worker.wait_for_layer(name)
        worker.layer_computed(name)
    worker.finish_step(plan)


def await_finished(worker: WorkerHalf, n: int) -> set[str]:
    finished: set[str] = set()
    deadline = time.monotonic() + 5
    while len(finished) < n and time.monotonic() < deadline:
        finished |= worker.take_finished((), idle=True)
    return finished


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layerwise_save", [False, True])
@pytest.mark.parametrize("layerwise_load", [False, True])
def test_saved_blocks_come_back_bit_for_bit(
    store: KVCache, make_worker: MakeWorker, layerwise_save: bool, layerwise_load: bool, device: str
) -> None:
    tensors, request = engine_tensors(device), Request("a", range(16))
    before = {block: block_bytes(tensors, block) for block in range(N_BLOCKS)}
    worker = make_worker(store, tensors, layerwise_save=layerwise_save)
    step(worker, StepPlan(saves=(run_of(request, 0, (3, 7, 5)),)))
    store.flush(10)
    step(worker, StepPlan(loads=(run_of(request, 0, (1, 11, 0)),), layerwise=layerwise_load))
    if not layerwise_load:
        assert await_finished(worker, 1) == {"a"}
    assert worker.take_failed() == set()
    after = [block_bytes(tensors, block) for block in range(N_BLOCKS)]
    assert [after[1], after[11], after[0]] == [before[3], before[7], before[5]]
    untouched = set(range(N_BLOCKS)) - {0, 1, 11}
    assert all(after[block] == before[block] for block in untouched)


def test_what_one_worker_saved_another_one_loads(store: KVCache, make_worker: MakeWorker) -> None:
    request = Request("a", range(16))
    blocks = fill(store, request, 4)
    tensors = engine_tensors()
    worker = make_worker(store, tensors)
    step(worker, StepPlan(loads=(run_of(request, 1, (9, 2)),)))
    await_finished(worker, 1)
    expected = [block.contiguous().view(torch.uint8).numpy().tobytes() for block in blocks[1:3]]
    assert [block_bytes(tensors, 9), block_bytes(tensors, 2)] == expected
    assert worker._cache.spec == SPEC


@pytest.mark.parametrize("layerwise", [False, True])
def test_blocks_that_are_not_there_are_reported(store: KVCache, make_worker: MakeWorker, layerwise: bool) -> None:
    request = Request("a", range(16))
    fill(store, request, 2)
    tensors = engine_tensors()
    before = [block_bytes(tensors, block) for block in range(N_BLOCKS)]
    worker = make_worker(store, tensors)
    step(worker, StepPlan(loads=(run_of(request, 0, (4, 5, 6, 8)),), layerwise=layerwise))
    if not layerwise:
        await_finished(worker, 1)
    assert worker.take_failed() == {6, 8}
    assert worker.take_failed() == set()
    assert [block_bytes(tensors, block) for block in (6, 8)] == [before[6], before[8]]
    tally = worker.take_tally()
    assert (tally["loaded_blocks"], tally["failed_blocks"]) == (2, 2)


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_store_that_raises_fails_the_load_and_not_the_engine(
    store: KVCache, make_worker: MakeWorker, layerwise: bool, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request("a", range(16))
    worker = make_worker(store, engine_tensors())
    store.close()
    for _ in range(3):
        step(worker, StepPlan(loads=(run_of(request, 0, (4, 5)),), layerwise=layerwise))
        if not layerwise:
            assert await_finished(worker, 1) == {"a"}
        assert worker.take_failed() == {4, 5}
    step(worker, StepPlan(saves=(run_of(request, 0, (4, 5)),)))
    assert len([r for r in caplog.records if "could not load" in r.message]) == 1


def test_a_layer_is_waited_for_and_no_later_one() -> None:
    """The first layer may be used while the second one is still on its way."""
    from kvstore_vllm.connector_layers import LayerLoad

    from kvstore.stream import LayerGroup

    tensors, go = engine_tensors(), threading.Event()
    value = torch.randn(1, 1, 1, 2, BLOCK_TOKENS, 8).to(torch.bfloat16)

    class TwoGroups:
        def stream(self, key: object) -> Iterator[LayerGroup]:
            del key
            yield LayerGroup(0, 1, 1, value)
            assert go.wait(5)
            yield LayerGroup(1, 1, 1, value)

    load = LayerLoad((3,), 2)

    def work() -> None:
        load.run(TwoGroups(), pages_of(tensors), None)  # type: ignore[arg-type]
        load.end()

    thread = threading.Thread(target=work)
    thread.start()
    load.wait_for(0)
    assert torch.equal(tensors[NAMES[0]][3].view(torch.uint8), value[0, 0, 0].view(torch.uint8))
    assert thread.is_alive()
    go.set()
    load.wait_for(1)
    assert torch.equal(tensors[NAMES[1]][3].view(torch.uint8), value[0, 0, 0].view(torch.uint8))
    thread.join(5)
    assert load.failed() == ()


def test_a_stream_that_breaks_off_fails_every_block() -> None:
    from kvstore_vllm.connector_layers import LayerLoad

    from kvstore.stream import LayerGroup

    class BreaksOff:
        def stream(self, key: object) -> Iterator[LayerGroup]:
            del key
            yield LayerGroup(0, 1, 2, torch.zeros(2, 1, 1, 2, BLOCK_TOKENS, 8, dtype=torch.bfloat16))

    load = LayerLoad((3, 4), 2)
    load.run(BreaksOff(), pages_of(engine_tensors()), None)  # type: ignore[arg-type]
    load.end()
    assert load.failed() == (3, 4)


def test_a_rank_that_does_not_write_saves_nothing(store: KVCache, make_worker: MakeWorker) -> None:
    request = Request("a", range(16))
    step(make_worker(store, engine_tensors(), writes=False), StepPlan(saves=(run_of(request, 0, (1, 2)),)))
    store.flush(10)
    assert store.lookup(prompt_key(request.block_hashes, BLOCK_TOKENS, None)).blocks == 0


@pytest.mark.parametrize(("clears", "salt"), [(True, None), (False, "own")])
def test_a_reset_reaches_the_workers_memory(
    make_store: OpenStore, make_worker: MakeWorker, clears: bool, salt: str | None
) -> None:
    store = make_store(l1={"capacity": "1MiB"})
    request = Request("a", range(16))
    worker = make_worker(store, engine_tensors())
    step(worker, StepPlan(saves=(run_of(request, 0, (1, 2)),)))
    step(worker, StepPlan(loads=(run_of(request, 0, (3, 4)),), resets=1, clears=clears, salt=salt))
    await_finished(worker, 1)
    assert worker.take_failed() == {3, 4}
    step(worker, StepPlan(saves=(run_of(request, 0, (1, 2)),), resets=1, clears=clears, salt=salt))
    step(worker, StepPlan(loads=(run_of(request, 0, (3, 4)),), resets=1, clears=clears, salt=salt))
    await_finished(worker, 1)
    assert worker.take_failed() == set()


def test_a_load_that_a_reset_overtakes_has_failed(store: KVCache, make_worker: MakeWorker) -> None:
    """What it brings is of the weights before."""
    request = Request("a", range(16))
    fill(store, request, 2)
    started, go = threading.Event(), threading.Event()

    class Slow:
        spec = store.spec

        def get(self, key: Any, out: Any) -> int:
            started.set()
            assert go.wait(5)
            return store.get(key, out)

        def clear(self) -> None: ...

        def close(self) -> None: ...

    worker = make_worker(Slow(), engine_tensors())
    step(worker, StepPlan(loads=(run_of(request, 0, (3, 4)),)))
    assert started.wait(5)
    worker.begin_step(StepPlan(resets=1))
    go.set()
    await_finished(worker, 1)
    assert worker.take_failed() == {3, 4}


def test_nothing_is_kept_of_a_request_that_is_over(store: KVCache, make_worker: MakeWorker) -> None:
    worker = make_worker(store, engine_tensors())
    for i in range(20):
        step(worker, StepPlan(saves=(run_of(Request(str(i), range(i, i + 8)), 0, (1, 2)),)))
    worker.take_finished([str(i) for i in range(20)], idle=False)
    worker.pause()
    assert worker.n_under_way == 0
    assert len(worker._keys) == 0
    tally = worker.take_tally()
    assert tally["saved_blocks"] == 40
    assert worker.take_tally() == {}


def test_an_idle_step_waits_for_a_load_but_not_for_long(store: KVCache, make_worker: MakeWorker) -> None:
    go = threading.Event()

    class Hangs:
        spec = store.spec

        def get(self, key: Any, out: Any) -> int:
            del key, out
            go.wait(5)
            return 0

        def close(self) -> None: ...

    worker = make_worker(Hangs(), engine_tensors())
    step(worker, StepPlan(loads=(run_of(Request("a", range(16)), 0, (3, 4)),)))
    start = time.monotonic()
    assert worker.take_finished((), idle=True) == set()
    assert time.monotonic() - start < 1
    go.set()

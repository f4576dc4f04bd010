"""A worker tells its cache how fast the model computes."""

from __future__ import annotations

import time

import pytest
import torch
from kvstore_vllm.connector_layout import BlockGeometry, layer_pages
from kvstore_vllm.connector_meta import StepPlan
from kvstore_vllm.connector_prefill import LEAST_TOKENS, PrefillTimer
from kvstore_vllm.connector_worker import WorkerHalf, WorkerSettings

from kvstore import KVCache
from tests.unit.vllm_connector.doubles import BLOCK_TOKENS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def worker(store: KVCache) -> WorkerHalf:
    tensors = {"model.layers.0.attn": torch.zeros((12, 2, BLOCK_TOKENS, 16), dtype=torch.bfloat16)}
    tensors["model.layers.1.attn"] = tensors["model.layers.0.attn"].clone()
    return WorkerHalf(store, layer_pages(tensors, BlockGeometry(12, BLOCK_TOKENS)), WorkerSettings())


def steps(worker: WorkerHalf, plan: StepPlan, n: int = 4) -> None:
    for _ in range(n):
        worker.begin_step(plan)
        worker.start_loads(plan)
        time.sleep(0.005)
        worker.finish_step(plan)


def test_prefills_teach_the_cache_the_speed(store: KVCache, worker: WorkerHalf) -> None:
    steps(worker, StepPlan(tokens=1000))
    assert 0 < store.stats().prefill_tokens_per_s <= 1000 / 0.005


@pytest.mark.parametrize("plan", [StepPlan(tokens=LEAST_TOKENS - 1), StepPlan(tokens=1000, layerwise=True)])
def test_decoding_and_steps_that_wait_for_loads_say_nothing(store: KVCache, worker: WorkerHalf, plan: StepPlan) -> None:
    steps(worker, plan)
    assert store.stats().prefill_tokens_per_s == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_a_timer_says_how_long_the_device_took(device: str) -> None:
    timer = PrefillTimer(torch.device(device))
    left = torch.ones((1024, 1024), device=device)
    assert timer.take() == []
    began = time.perf_counter()
    timer.begin(LEAST_TOKENS, 7)
    for _ in range(8):
        left = left @ left
        left /= left.max()
    timer.end()
    if device != "cpu":
        torch.cuda.synchronize()
    taken = time.perf_counter() - began
    (prefill,) = timer.take()
    assert (prefill.tokens, prefill.context_tokens) == (LEAST_TOKENS, 7)
    assert 0 < prefill.seconds <= taken
    assert timer.take() == []


def test_a_step_without_an_end_is_forgotten() -> None:
    timer = PrefillTimer(torch.device("cpu"))
    timer.begin(LEAST_TOKENS, 0)
    timer.begin(1, 0)
    timer.end()
    assert timer.take() == []

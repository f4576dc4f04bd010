"""SGLang's cache controller with its own storage threads over kvstore: backup, query and prefetch as in a server.

The scheduler's part (allocating host pages, draining queues) is played by the test, because it needs a model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (make test-engines)", allow_module_level=True)

from kvstore.engine_hashes import sglang_page_hashes
from tests.engines.sglang import rig
from tests.engines.sglang.conftest import ConfigOf, OpenBackend
from tests.engines.sglang.rig import PAGE, content, pages, scramble, wipe

pytestmark = pytest.mark.engine

TOKENS = [(i * 7919 + 13) % 32_000 for i in range(12 * PAGE)]
WAIT_S = 30.0

StartController = Callable[[Any, Any], Any]


@pytest.fixture
def start_controller() -> Iterator[StartController]:
    """A controller in the state that ``attach_storage_backend`` leaves it in, on one rank, with its threads running."""
    started: list[Any] = []

    def start(backend: Any, pool: Any) -> Any:
        controller = object.__new__(rig.cache_controller.HiCacheController)
        controller.storage_backend, controller.storage_host_pool, controller.mem_pool_host = backend, pool, pool
        controller.page_size, controller.enable_storage = PAGE, True
        controller.storage_config = rig.storage_config({})
        controller.storage_stop_event = threading.Event()
        controller.prefetch_hits_sync_groups, controller.prefetch_completion_sync_groups = [], []
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
        controller._start_storage_threads()
        started.append(controller)
        return controller

    yield start
    for controller in started:
        controller._stop_storage_threads()


def back_up(controller: Any, numbers: range) -> int:
    """Store pages of the prompt; returns the tokens that SGLang counts as stored."""
    names = rig.utils.get_hash_str(TOKENS, None, page_size=PAGE)
    controller.write_storage(
        pages(*numbers), TOKENS[numbers.start * PAGE : numbers.stop * PAGE], hash_value=[names[n] for n in numbers]
    )
    return int(controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens)


def prefetch(controller: Any, request: str = "r") -> tuple[int, int]:
    """Query the prompt and load what is there; returns tokens found and tokens loaded."""
    controller.prefetch(request, list(TOKENS))
    operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    operation.host_indices = pages(*range(operation.storage_hit_count // PAGE))
    controller.prefetch_buffer.put(operation)
    loaded, until = 0, time.monotonic() + WAIT_S
    while time.monotonic() < until:
        ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
        loaded = ack.completed_tokens if ack.completed_tokens is not None else loaded
        if ack.completed_req:
            return operation.storage_hit_count, loaded
    raise TimeoutError(request)


def test_a_prompt_that_was_backed_up_is_prefetched_bit_for_bit(
    medium: str, config_of: ConfigOf, open_backend: OpenBackend, start_controller: StartController
) -> None:
    pool = rig.mha_pool(n_pages=12)
    scramble(pool)
    before = content(pool)
    config = {"config": config_of(medium)}
    controller = start_controller(open_backend(config, ("kv", pool)), pool)
    assert prefetch(controller) == (0, 0)
    assert back_up(controller, range(12)) == 12 * PAGE
    controller.storage_backend.close()  # as at detach: what is queued is written
    wipe(pool)
    fresh = start_controller(open_backend(config, ("kv", pool)), pool)
    assert prefetch(fresh) == (12 * PAGE, 12 * PAGE)
    assert content(pool) == before


def test_pages_that_vanish_between_query_and_read_shorten_the_prefix(
    tmp_path: Path, config_of: ConfigOf, open_backend: OpenBackend, start_controller: StartController
) -> None:
    pool = rig.mha_pool(n_pages=12)
    scramble(pool)
    backend = open_backend({"config": config_of("lmdb")}, ("kv", pool))
    controller = start_controller(backend, pool)
    assert back_up(controller, range(12)) == 12 * PAGE
    backend.flush(20)
    expected = [pool.get_data_page(n * PAGE).view(torch.uint8).clone() for n in range(12)]
    wipe(pool)
    controller.prefetch("r", list(TOKENS))
    operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    assert operation.storage_hit_count == 12 * PAGE
    cache = backend._store.pool("kv").cache
    names = sglang_page_hashes(TOKENS, page_tokens=PAGE)
    from kvstore import KVCacheKey

    assert cache.delete(KVCacheKey.from_block_hashes([names[7]], block_tokens=PAGE, chained=True)) == 1
    operation.host_indices = pages(*range(12))
    controller.prefetch_buffer.put(operation)
    ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
    assert ack.completed_tokens == 7 * PAGE
    assert [pool.get_data_page(n * PAGE).view(torch.uint8).equal(expected[n]) for n in range(7)] == [True] * 7


def test_sglangs_own_faults_cost_hits_and_never_bytes(
    config_of: ConfigOf, open_backend: OpenBackend, start_controller: StartController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fault injector delays and fails a third of all calls; whatever is delivered in the end is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.33")
    pool = rig.mha_pool(n_pages=12)
    scramble(pool)
    backend = open_backend({"config": config_of("lmdb")}, ("kv", pool))
    assert isinstance(backend, rig.hicache_storage.HiCacheStorageFailureInjector)
    controller = start_controller(backend, pool)
    expected = [pool.get_data_page(n * PAGE).view(torch.uint8).clone() for n in range(12)]
    stored = sum(back_up(controller, range(12)) == 12 * PAGE for _ in range(12))
    assert 0 < stored < 12  # the injector works, and not all calls fail
    backend._backend.flush(20)
    wipe(pool)
    outcomes = set()
    for attempt in range(30):
        found, loaded = prefetch(controller, f"r{attempt}")
        outcomes.add((found, loaded))
        for n in range(loaded // PAGE):
            assert pool.get_data_page(n * PAGE).view(torch.uint8).equal(expected[n])
        wipe(pool)
    assert outcomes == {(0, 0), (12 * PAGE, 0), (12 * PAGE, 12 * PAGE)}


def test_backups_queries_and_prefetches_at_once_never_mix_pages_up(
    config_of: ConfigOf, open_backend: OpenBackend, start_controller: StartController
) -> None:
    """One instance writes a prompt page by page while another asks for it and reads it again and again."""
    source, target = rig.mha_pool(n_pages=12), rig.mha_pool(n_pages=12)
    scramble(source)
    config = {"config": config_of("lmdb")}
    writer = start_controller(open_backend(config, ("kv", source)), source)
    reader = start_controller(open_backend(config, ("kv", target)), target)
    expected = [source.get_data_page(n * PAGE).view(torch.uint8) for n in range(12)]
    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def write() -> None:
        try:
            for n in range(12):
                assert back_up(writer, range(n, n + 1)) == PAGE
        except BaseException as e:  # noqa: BLE001 - told to the test
            failed.put(e)

    thread = threading.Thread(target=write)
    thread.start()
    until = time.monotonic() + WAIT_S
    loaded, seen = 0, []
    while loaded < 12 * PAGE and time.monotonic() < until:
        _, loaded = prefetch(reader)
        seen.append(loaded)
        assert all(target.get_data_page(n * PAGE).view(torch.uint8).equal(expected[n]) for n in range(loaded // PAGE))
    thread.join(WAIT_S)
    assert failed.empty(), failed.get()
    assert seen == sorted(seen)
    assert loaded == 12 * PAGE

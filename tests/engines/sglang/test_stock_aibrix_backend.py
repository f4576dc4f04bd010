"""SGLang's own ``aibrix`` storage backend, unchanged, over ``kvstore.compat.aibrix``."""

from __future__ import annotations

import gc
import logging
import queue
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (make test-engines)", allow_module_level=True)

import kvstore.compat.aibrix
from kvstore import Namespace
from tests.engines.sglang import rig
from tests.engines.sglang.conftest import ConfigOf
from tests.engines.sglang.rig import PAGE, hashes

pytestmark = pytest.mark.engine

N_PAGES = 4


def values(n: int, seed: int = 1) -> list[torch.Tensor]:
    """Pages with their axes, random bytes as bfloat16."""
    raw = torch.randint(
        0, 256, (n, 2, 2, PAGE, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return list(raw.view(torch.bfloat16).unbind(0))


def targets(n: int) -> list[torch.Tensor]:
    return [torch.zeros(2 * 2 * PAGE * 3 * 8, dtype=torch.bfloat16) for _ in range(n)]


def as_bytes(page: torch.Tensor) -> bytes:
    return bytes(page.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.fixture
def stock(config_of: ConfigOf) -> Iterator[Any]:
    """``--hicache-storage-backend aibrix`` as SGLang's factory makes it, after ``install()``."""
    config = config_of("lmdb") | {"l1": {"capacity": "4MiB"}}
    kvstore.compat.aibrix.install(config, namespace=Namespace(model="demo", revision="1"))
    try:
        pool = rig.mha_pool("layer_first")
        backend = rig.StorageBackendFactory.create_backend("aibrix", rig.storage_config({}), pool)
        assert type(backend).__module__ == "sglang.srt.mem_cache.storage.aibrix_kvcache.aibrix_kvcache_storage"
        assert isinstance(backend.kv_cache_manager, kvstore.compat.aibrix.BaseKVCacheManager)
        yield backend
        backend.kv_cache_manager.close()
    finally:
        kvstore.compat.aibrix.uninstall()


def test_sglangs_own_test_of_it_passes(stock: Any) -> None:
    """The steps of ``unit_test.py`` beside the backend in SGLang, with random bytes instead of random numbers."""
    names, pages = hashes(N_PAGES), values(N_PAGES)
    assert stock.batch_exists(names) == 0
    assert stock.batch_set(names, pages)
    got = targets(N_PAGES)
    stock.batch_get(names, got)
    assert [as_bytes(page) for page in got] == [as_bytes(page) for page in pages]
    assert stock.batch_exists(names) == N_PAGES
    assert stock.batch_exists(names[2:]) == 2
    some = targets(2)
    stock.batch_get(names[2:], some)
    assert [as_bytes(page) for page in some] == [as_bytes(page) for page in pages[2:]]
    assert stock.exists(names[0])
    assert not stock.exists(hashes(1, first=99)[0])


def test_single_pages_go_in_and_out(stock: Any) -> None:
    (page,) = values(1)
    (name,) = hashes(1)
    (target,) = targets(1)
    assert stock.get(name, target) is None
    assert stock.set(name, page)
    assert as_bytes(stock.get(name, target)) == as_bytes(page)


def test_a_partial_hit_is_an_assertion_in_sglang_and_nothing_else(stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    """``batch_get`` asserts that all pages came; SGLang's prefetch thread catches that and counts no hit.

    The prefix that kvstore found is lost to this backend (``KVStoreHiCache`` delivers it), but no target was
    written, and what the backend forgot to release comes back by itself.
    """
    names, pages = hashes(N_PAGES), values(N_PAGES)
    assert stock.batch_set(names[:2], pages[:2])
    got = targets(N_PAGES)
    with pytest.raises(AssertionError):
        stock.batch_get(names, got)
    assert not any(any(as_bytes(page)) for page in got)
    gc.collect()
    assert stock.batch_exists(names) == 2
    with caplog.at_level(logging.ERROR):
        for _ in range(50):  # more than L1 could pin for good: 4 MiB hold 2,730 pages, each try keeps two
            with pytest.raises(AssertionError):
                stock.batch_get(names, got)
    again = targets(2)
    stock.batch_get(names[:2], again)
    assert [as_bytes(page) for page in again] == [as_bytes(page) for page in pages[:2]]


def test_the_controller_takes_such_an_assertion_for_no_hit(stock: Any) -> None:
    controller = object.__new__(rig.cache_controller.HiCacheController)
    controller.storage_backend, controller.storage_host_pool = stock, rig.mha_pool("layer_first")
    controller.page_size = PAGE
    controller.page_get_func = controller._generic_page_get
    controller.prefetch_sync_queue = queue.Queue()
    names, pages = hashes(N_PAGES), values(N_PAGES)
    assert stock.batch_set(names[:2], pages[:2])
    operation = rig.cache_controller.PrefetchOperation("r", list(range(N_PAGES * PAGE)))
    operation.hash_value, operation.host_indices = names, torch.arange(N_PAGES * PAGE)
    logging.getLogger("sglang.srt.managers.cache_controller").setLevel(logging.CRITICAL)
    try:
        assert controller._page_transfer(operation) == 0
    finally:
        logging.getLogger("sglang.srt.managers.cache_controller").setLevel(logging.NOTSET)
    operation.hash_value = names[:2]
    assert controller._page_transfer(operation) == 2


def test_latents_are_refused_by_the_backend_itself(stock: Any) -> None:
    del stock  # keeps the names installed
    with pytest.raises(NotImplementedError, match="MLA is not supported"):
        rig.StorageBackendFactory.create_backend(
            "aibrix", rig.storage_config({}, is_mla_model=True), rig.mha_pool("layer_first")
        )

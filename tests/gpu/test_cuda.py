"""Blocks in CUDA memory: the same bytes through every path, in the order of the caller's streams.

Skipped where torch sees no accelerator.  ``_sleep`` keeps a stream busy for a while, so that a copy
that does not wait for it, or that waits for more than it, is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, CapacityError, KVCache, KVCacheKey, Namespace, PagedBlocks
from kvstore.l1.counters import L1Counters
from tests.support import key_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]
BUSY_CYCLES = 400_000_000  # 0.2 s and more on the clocks of current cards
N_PAGES = 64
IDS = list(range(3, 43))
OUT_IDS = list(range(60, 20, -1))

OpenCuda = Callable[..., KVCache]


def spec_of(dtype: str, *, head_dim: int = 64, layers: int = 4) -> BlockSpec:
    return BlockSpec(layers=layers, kv_heads=2, head_dim=head_dim, block_tokens=16, dtype=dtype)


def pages_of(spec: BlockSpec, seed: int, *, kv_first: bool = False) -> list[torch.Tensor]:
    """One tensor of random pages per layer, every bit pattern included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, N_PAGES, *spec.shape[2:]) if kv_first else (N_PAGES, *spec.shape[1:])
    nbytes = N_PAGES * spec.nbytes // spec.layers
    raw = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for _ in range(spec.layers)]
    return [r.to(DEVICE).view(spec.torch_dtype()).view(shape) for r in raw]


def bits(layers: Sequence[torch.Tensor], ids: Sequence[int], dim: int = 0) -> torch.Tensor:
    """The bytes of pages, block after block; synchronises."""
    chosen = torch.tensor(ids, dtype=torch.int64, device=DEVICE)
    pages = [layer.view(torch.uint8).index_select(dim, chosen) for layer in layers]
    return torch.stack([page.movedim(dim, 0).flatten(1) for page in pages], 1).cpu()


@pytest.fixture
def open_cuda(tmp_path: Path) -> Iterator[OpenCuda]:
    opened: list[KVCache] = []

    def open_one(spec: BlockSpec, *, tiers: bool = False, **l1: Any) -> KVCache:
        config: dict[str, Any] = {"l1": {"capacity": "64MiB"} | l1}
        if tiers:
            config["l2"] = [{"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "256MiB"}]
        opened.append(KVCache.open(config, spec=spec, namespace=Namespace(model="test/model", revision="r1")))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()


L1_KINDS: dict[str, dict[str, Any]] = {
    "pinned": {},
    "unpinned": {"pin": "never"},
    "device pool": {"device": DEVICE, "device_capacity": "32MiB"},
    "small device pool": {"device": DEVICE, "device_capacity": "1MiB"},
}


@pytest.fixture(params=list(L1_KINDS))
def l1_kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    torch.zeros(1, device=DEVICE)  # so that CUDA is in use when the cache opens
    kind: dict[str, Any] = L1_KINDS[request.param]
    return kind


def counters(cache: KVCache) -> L1Counters:
    found = cache.stats().l1
    assert found is not None
    return found


def busy() -> None:
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def now() -> torch.cuda.Event:
    """An event on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_first", [False, True])
def test_pages_come_back_bit_for_bit(open_cuda: OpenCuda, l1_kind: dict[str, Any], dtype: str, kv_first: bool) -> None:
    spec, dim = spec_of(dtype), int(kv_first)
    source, out = pages_of(spec, 0, kv_first=kv_first), pages_of(spec, 1, kv_first=kv_first)
    others = [page for page in range(N_PAGES) if page not in OUT_IDS]
    before = bits(out, others, dim)
    cache, key = open_cuda(spec, **l1_kind), key_of("tokens", len(IDS))

    assert cache.put(key, PagedBlocks(source, IDS, block_dim=dim)) == len(IDS)
    for _ in range(2):  # from host memory or the device pool, then from where it is now
        assert cache.get(key, PagedBlocks(out, OUT_IDS, block_dim=dim)) == len(IDS)
        assert torch.equal(bits(out, OUT_IDS, dim), bits(source, IDS, dim))
        assert torch.equal(bits(out, others, dim), before)
        for layer in out:
            layer.view(torch.uint8).index_fill_(dim, torch.tensor(OUT_IDS, device=DEVICE), 0)
    host = torch.empty(len(IDS), *spec.shape, dtype=spec.torch_dtype())
    assert cache.get(key, host) == len(IDS)
    assert torch.equal(host.view(torch.uint8).view(len(IDS), spec.layers, -1), bits(source, IDS, dim))


def test_blocks_from_a_tier(open_cuda: OpenCuda, l1_kind: dict[str, Any]) -> None:
    spec = spec_of("bfloat16")
    source, out = pages_of(spec, 0), pages_of(spec, 1)
    key = key_of("tokens", len(IDS))
    first = open_cuda(spec, tiers=True, **l1_kind)
    first.put(key.prefix(30), PagedBlocks(source, IDS[:30]))
    first.flush(10)
    first.close()

    cache, behind = open_cuda(spec, tiers=True, **l1_kind), bits(out, OUT_IDS[30:])
    for _ in range(3):  # past L1, promoted into it, and from it
        assert cache.get(key, PagedBlocks(out, OUT_IDS)) == 30
        assert torch.equal(bits(out, OUT_IDS[:30]), bits(source, IDS[:30]))
        assert torch.equal(bits(out, OUT_IDS[30:]), behind)
    cache.delete(key[5:6])
    statuses = cache.get_each(key, PagedBlocks(out, OUT_IDS))
    assert [i for i, s in enumerate(statuses) if s is not BlockStatus.DELIVERED] == [5, *range(30, 40)]


@pytest.mark.parametrize("pages_per_block", [2, 4])
def test_joined_pages(open_cuda: OpenCuda, l1_kind: dict[str, Any], pages_per_block: int) -> None:
    page = spec_of("float8_e4m3fn")
    spec = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16 * pages_per_block, dtype=page.dtype)
    source, out = pages_of(page, 0), pages_of(page, 1)
    key = key_of("tokens", 40 // pages_per_block, block_tokens=spec.block_tokens)
    cache = open_cuda(spec, **l1_kind)
    cache.put(key, PagedBlocks(source, IDS, pages_per_block=pages_per_block))
    assert cache.get(key, PagedBlocks(out, OUT_IDS, pages_per_block=pages_per_block)) == len(key)
    assert torch.equal(bits(out, OUT_IDS), bits(source, IDS))


def test_dense_strided_and_listed_tensors(open_cuda: OpenCuda, l1_kind: dict[str, Any]) -> None:
    spec = spec_of("bfloat16")
    cache, key = open_cuda(spec, **l1_kind), key_of("tokens", N_PAGES)
    blocks = torch.stack(pages_of(spec, 0), 1)
    strided = blocks.transpose(0, 1).contiguous().transpose(0, 1)
    assert cache.put(key, strided) == N_PAGES
    whole, listed = torch.zeros_like(blocks), [torch.zeros_like(blocks[0]) for _ in range(N_PAGES)]
    assert cache.get(key, whole) == cache.get(key, listed) == N_PAGES
    assert torch.equal(whole.view(torch.uint8), blocks.view(torch.uint8))
    assert torch.equal(torch.stack(listed).view(torch.uint8), blocks.view(torch.uint8))


@pytest.mark.parametrize("own_stream", [False, True])
def test_put_waits_for_the_callers_work(open_cuda: OpenCuda, l1_kind: dict[str, Any], own_stream: bool) -> None:
    spec = spec_of("bfloat16")
    source, written = pages_of(spec, 0), pages_of(spec, 1)
    cache, key = open_cuda(spec, **l1_kind), key_of("tokens", len(IDS))
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream() if own_stream else torch.cuda.current_stream()):
        busy()
        for target, new in zip(source, written, strict=True):
            target.copy_(new)
        cache.put(key, PagedBlocks(source, IDS))
        for target in source:  # put has returned: the pages are the caller's again
            target.zero_()
    out = pages_of(spec, 2)
    assert cache.get(key, PagedBlocks(out, OUT_IDS)) == len(IDS)
    assert torch.equal(bits(out, OUT_IDS), bits(written, IDS))


@pytest.mark.parametrize("own_stream", [False, True])
def test_get_stands_between_the_callers_work_before_and_after(
    open_cuda: OpenCuda, l1_kind: dict[str, Any], own_stream: bool
) -> None:
    spec = spec_of("bfloat16")
    source, out = pages_of(spec, 0), pages_of(spec, 1)
    cache, key = open_cuda(spec, **l1_kind), key_of("tokens", len(IDS))
    cache.put(key, PagedBlocks(source, IDS))
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream() if own_stream else torch.cuda.current_stream()):
        for _ in range(2):
            busy()
            for target in out:
                target.zero_()  # late, but before the blocks arrive
            assert cache.get(key, PagedBlocks(out, OUT_IDS)) == len(IDS)
            seen = [target.clone() for target in out]  # at once, but behind them
            torch.cuda.current_stream().synchronize()
            assert torch.equal(bits(seen, OUT_IDS), bits(source, IDS))


def test_nobody_waits_for_other_streams(open_cuda: OpenCuda, l1_kind: dict[str, Any]) -> None:
    spec = spec_of("bfloat16")
    source, out = pages_of(spec, 0), pages_of(spec, 1)
    cache, key = open_cuda(spec, **l1_kind), key_of("tokens", len(IDS))
    cache.put(key.prefix(1), PagedBlocks(source, IDS[:1]))  # buffers and kernels are there
    cache.get(key.prefix(1), PagedBlocks(out, OUT_IDS[:1]))
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream()):
        for _ in range(10):
            busy()
        ended = now()
    cache.put(key, PagedBlocks(source, IDS))
    cache.get(key, PagedBlocks(out, OUT_IDS))
    torch.cuda.current_stream().synchronize()
    assert not passed(ended)
    assert torch.equal(bits(out, OUT_IDS), bits(source, IDS))


def test_get_returns_before_the_device_is_done(open_cuda: OpenCuda) -> None:
    """The bytes are on their way when get returns; only the caller's stream waits for them."""
    spec = spec_of("bfloat16")
    source, out = pages_of(spec, 0), pages_of(spec, 1)
    cache = open_cuda(spec, device=DEVICE, device_capacity="32MiB")
    key = key_of("tokens", len(IDS))
    cache.put(key, PagedBlocks(source, IDS))
    cache.get(key, PagedBlocks(out, OUT_IDS))
    torch.cuda.synchronize()
    for _ in range(5):
        busy()
    begin = now()
    cache.get(key, PagedBlocks(out, OUT_IDS))  # from the device pool
    assert not passed(begin)
    assert torch.equal(bits(out, OUT_IDS), bits(source, IDS))


def test_a_transfer_is_ordered_with_the_stream_of_its_submission(open_cuda: OpenCuda, l1_kind: dict[str, Any]) -> None:
    spec = spec_of("bfloat16")
    source, out = pages_of(spec, 0), pages_of(spec, 1)
    cache, key = open_cuda(spec, **l1_kind), key_of("tokens", len(IDS))
    cache.put(key, PagedBlocks(source, IDS))
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream()):
        busy()
        for target in out:
            target.zero_()
        transfer = cache.submit_get(key, PagedBlocks(out, OUT_IDS))
        assert transfer.wait(20) == len(IDS)
        seen = [target.clone() for target in out]
        torch.cuda.current_stream().synchronize()
    assert torch.equal(bits(seen, OUT_IDS), bits(source, IDS))


def test_the_slab_is_page_locked(open_cuda: OpenCuda) -> None:
    torch.zeros(1, device=DEVICE)
    cache = open_cuda(spec_of("bfloat16"))
    found = counters(cache)
    if not found.pinned_host_bytes:
        assert found.pin_refusals == 1
        pytest.skip("the system refuses to page-lock 64 MiB")
    l1 = cache._use().stack.l1
    assert l1 is not None
    assert torch.from_numpy(l1.pool.payload(0)).is_pinned()
    cache.close()
    again = open_cuda(spec_of("bfloat16"), pin="never")
    assert counters(again).pinned_host_bytes == 0


def test_a_refusal_to_page_lock_leaves_no_error_behind(open_cuda: OpenCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.l1 import pinned

    torch.zeros(1, device=DEVICE)
    assert not pinned.pin(0x1000, 4096)  # no memory of this process
    assert torch.equal(torch.arange(1000, device=DEVICE).cpu(), torch.arange(1000))


def test_the_device_pool_serves_what_it_holds(open_cuda: OpenCuda) -> None:
    spec = spec_of("bfloat16")
    source, out = pages_of(spec, 0), pages_of(spec, 1)
    cache = open_cuda(spec, device=DEVICE, device_capacity="32MiB")
    key = key_of("tokens", len(IDS))
    cache.put(key, PagedBlocks(source, IDS))
    assert counters(cache).device_blocks == len(IDS)
    cache.get(key, PagedBlocks(out, OUT_IDS))
    assert counters(cache).device_hits == len(IDS)
    cache.delete(key[10:])
    assert counters(cache).device_blocks == 10
    cache.put(key, PagedBlocks(out, IDS))  # other bytes under the same names
    again = pages_of(spec, 2)
    assert cache.get(key, PagedBlocks(again, OUT_IDS)) == len(IDS)
    assert torch.equal(bits(again, OUT_IDS[:10]), bits(source, IDS[:10]))
    assert torch.equal(bits(again, OUT_IDS[10:]), bits(out, IDS[10:]))


def test_more_device_memory_than_there_is_is_refused(open_cuda: OpenCuda) -> None:
    with pytest.raises(CapacityError, match=r"lower l1\.device_capacity"):
        open_cuda(spec_of("bfloat16"), device=DEVICE, device_capacity=1 << 44)


def test_threads_with_streams_of_their_own_never_get_other_bytes(open_cuda: OpenCuda) -> None:
    """More blocks than the pools hold, put, read and deleted at once."""
    spec = spec_of("bfloat16")
    source = pages_of(spec, 0)
    cache = open_cuda(spec, capacity="2MiB", device=DEVICE, device_capacity="1MiB")
    keys: list[KVCacheKey] = [key_of("tokens", 8, seed=seed) for seed in range(8)]
    torch.cuda.synchronize()

    def work(worker: int) -> int:
        got, generator = 0, torch.Generator().manual_seed(worker)
        with torch.cuda.stream(new_stream()):
            out = pages_of(spec, 100 + worker)
            until = time.monotonic() + 5
            while time.monotonic() < until:
                n, what = torch.randint(0, 8, (2,), generator=generator).tolist()
                ids = list(range(8 * n, 8 * n + 8))
                if what < 2:
                    cache.put(keys[n], PagedBlocks(source, ids))
                elif what == 2:
                    cache.delete(keys[n][4:])
                else:
                    n_blocks = cache.get(keys[n], PagedBlocks(out, range(8)))
                    assert torch.equal(bits(out, range(n_blocks)), bits(source, ids[:n_blocks]))
                    got += n_blocks
        return got

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 0
    assert counters(cache).device_hits > 0

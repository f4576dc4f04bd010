"""A20: a caller may reuse its buffer as soon as a call returns, and owns what it was given."""

from __future__ import annotations

import gc

import torch

from tests.faults.media import server_of
from tests.faults.process import Forge, Shim
from tests.faults.s3_faults import S3FaultServer
from tests.faults.store import Store, over
from tests.support_faults import SMALL, WatchedCache, chain, noise, same, target, unrelated

N = 8
KEY = chain(N, seed=20)


def served(cache: WatchedCache, n: int = N) -> torch.Tensor:
    out = target(SMALL, n)
    assert cache.get(KEY[:n], out) == n
    return out


def put_and_spoil(cache: WatchedCache) -> None:
    """Every way to hand blocks over, each followed at once by other bytes in the same memory."""
    blocks = noise(SMALL, range(N))
    mine = blocks[:3].clone()
    cache.put(KEY[:3], mine)  # one tensor for several blocks
    mine.view(torch.uint8).fill_(7)
    one = torch.empty(SMALL.shape, dtype=SMALL.torch_dtype())
    for i in (3, 4):  # one buffer for block after block
        one.copy_(blocks[i])
        cache.put(KEY[i : i + 1], [one])
        one.view(torch.uint8).fill_(7)
    large = torch.zeros((100, *SMALL.shape), dtype=SMALL.torch_dtype())
    large[50:52].copy_(blocks[5:7])
    cache.put(KEY[5:7], large[50:52])  # a view of something large, which then goes away
    large.view(torch.uint8).fill_(7)
    del large
    strided = torch.zeros((2, *SMALL.shape), dtype=SMALL.torch_dtype())[::2]
    strided.copy_(blocks[7:8])
    cache.put(KEY[7:8], [strided[0]])
    strided.view(torch.uint8).fill_(7)
    del strided, one, mine
    gc.collect()


def assert_snapshots(store: Store, l1: str | None) -> None:
    blocks = noise(SMALL, range(N))
    with store.open(l1=l1) as cache:
        put_and_spoil(cache)
        if l1 is not None:
            assert same(served(cache), blocks)  # before anything was written
        cache.flush(60)
        assert same(served(cache), blocks)
    with store.open() as cache:
        assert same(served(cache), blocks)


@over("LNTS")
def test_what_was_put_is_what_the_tensor_held_then(store: Store) -> None:
    assert_snapshots(store, None)


@over("S")
def test_what_was_put_is_what_the_tensor_held_then_while_the_server_is_slow(store: Store) -> None:
    server: S3FaultServer = server_of(store)
    server.latency_s = 0.05
    assert_snapshots(store, "1MiB")


SLOWLY = """
from tests.faults.test_a20_reused_buffers import *
from tests.support_faults import Fault, FaultSwitch
shim = FaultSwitch(Path(ARGS[0]))
with STORE.open(l1="1MiB"):
    pass
shim.set(Fault.SLOW, delay_ms=50)
assert_snapshots(STORE, "1MiB")
print(json.dumps(shim.injected))
"""


@over("LNT")
def test_what_was_put_is_what_the_tensor_held_then_while_the_disk_is_slow(
    store: Store, forge: Forge, shim: Shim
) -> None:
    assert forge.work(SLOWLY, store, shim.control, shim=shim) > 0


@over("LNTS")
def test_what_was_got_belongs_to_the_caller(store: Store) -> None:
    blocks, others = noise(SMALL, range(N)), noise(SMALL, range(100, 160))
    cache = store.open(l1="1MiB")  # 30 blocks
    with cache:
        cache.put(KEY, blocks)
        cache.flush(60)
        for _ in range(2):  # from L1, then from the tier
            one, two = served(cache), served(cache)
            one.view(torch.uint8).fill_(9)
            assert same(two, blocks)
            assert same(served(cache), blocks)
            for i in range(60):
                cache.put(unrelated(i), others[i : i + 1])
            cache.flush(60)
        kept = served(cache)
        assert cache.delete(KEY) == N
        for i in range(60):
            cache.put(unrelated(200 + i), others[i : i + 1])
        cache.flush(60)
        cache.clear()
        assert cache.get(KEY, target(SMALL, N)) == 0
        assert same(kept, blocks)
    assert same(kept, blocks)


@over("LNTS")
def test_a_lease_keeps_its_bytes_through_eviction_deletion_and_close(store: Store) -> None:
    blocks, others = noise(SMALL, range(N)), noise(SMALL, range(100, 160))
    with store.open(l1="1MiB") as cache:
        cache.store(KEY, blocks)
        lease = cache.acquire(KEY)
        assert len(lease) == N
        assert same(torch.stack(list(lease.tensors)), blocks)
        cache.delete(KEY)
        for i in range(60):
            cache.put(unrelated(i), others[i : i + 1])
        cache.flush(60)
        assert same(torch.stack(list(lease.tensors)), blocks)
        cache.clear()
        assert same(torch.stack(list(lease.tensors)), blocks)
    assert same(torch.stack(list(lease.tensors)), blocks)
    lease.release()
    lease.release()


@over("LNTS")
def test_layers_of_a_stream_belong_to_the_caller(store: Store) -> None:
    blocks = noise(SMALL, range(N))
    with store.open(l1="1MiB") as cache:
        cache.store(KEY, blocks)
        for _ in range(2):
            groups = list(cache.stream(KEY))
            assert groups[-1].n_blocks == N
            layers = torch.cat([group.tensor[:N] for group in groups], dim=1)
            assert same(layers, blocks)
            for group in groups:
                group.tensor.view(torch.uint8).fill_(9)
            assert same(served(cache), blocks)

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.errors import ClosedError
from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.lease import Lease
from kvstore.l1.policies.prefix_lru import PrefixLruPolicy
from kvstore.spec import DTYPES, BlockSpec

Chain = Callable[[str, int], list[bytes]]
MakeL1 = Callable[..., L1Cache]
Put = Callable[..., list[Entry]]
Content = Callable[[bytes, int], np.ndarray]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def acquire(l1: L1Cache, key: list[bytes]) -> Lease:
    return Lease(l1, l1.pin_leading(key))


def test_tensors_are_the_blocks_bit_for_bit_and_zero_copy(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(8), chain("a", 3)
    entries = put(l1, key)
    with acquire(l1, [*key, *chain("b", 2)]) as lease:
        assert lease.blocks == len(lease) == len(lease.tensors) == 3
        for tensor, digest, entry in zip(lease.tensors, key, entries, strict=True):
            assert tuple(tensor.shape) == l1.spec.shape
            assert tensor.dtype is torch.bfloat16
            assert tensor.is_contiguous()
            assert as_bytes(tensor) == content(digest, l1.spec.nbytes).tobytes()
            assert tensor.data_ptr() == l1.pool.payload(entry.slot).__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_viewed_in_place(dtype: str, chain: Chain) -> None:
    if dtype == "opaque":
        spec = BlockSpec.opaque(1001, block_tokens=16, tag="packed")
    else:
        spec = BlockSpec(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype=dtype, layout="NCLD")
    l1 = L1Cache(spec, 2 * 8192, lambda _: PrefixLruPolicy())
    block = np.random.default_rng(1).integers(0, 256, spec.nbytes, np.uint8)
    slots = l1.reserve(1)
    l1.pool.payload(slots[0])[:] = block
    with Lease(l1, l1.publish([(chain("a", 1)[0], None)], slots, pins=1)) as lease:
        (tensor,) = lease.tensors
        assert tuple(tensor.shape) == spec.shape
        assert tensor.dtype is spec.torch_dtype()
        assert as_bytes(tensor) == block.tobytes()
    del tensor
    l1.close()


def test_release_gives_the_pins_back_at_once_and_once(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)
    lease, other = acquire(l1, key), acquire(l1, key[:1])
    kept = lease.tensors[1]
    lease.release()
    lease.release()
    assert l1.counters.pinned_blocks == 1

    with pytest.raises(ClosedError, match="was released"):
        _ = lease.tensors
    del kept, lease
    other.release()
    counters = l1.counters
    assert counters.pinned_blocks == 0
    assert counters.leases_dropped == 0
    assert len(put(l1, chain("b", 4))) == 4


def test_leases_may_be_released_in_any_order_and_by_an_exception(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)
    leases = [acquire(l1, key) for _ in range(3)]
    with pytest.raises(RuntimeError, match="engine"), leases[1]:
        raise RuntimeError("engine")
    leases[2].release()
    assert l1.counters.pinned_blocks == 4
    leases[0].release()

    assert l1.counters.pinned_blocks == 0
    assert [e.pins for e in l1.pin_leading(key)] == [1] * 4


def test_a_dropped_lease_lives_as_long_as_its_last_view(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)
    lease = acquire(l1, key)
    view = lease.tensors[2][1:, 0].transpose(0, 1)  # a view of a view
    del lease
    assert l1.counters.pinned_blocks == 1
    assert l1.counters.leases_dropped == 0

    assert len(put(l1, chain("flood", 4))) == 3
    expected = torch.frombuffer(bytearray(content(key[2], l1.spec.nbytes)), dtype=torch.bfloat16)
    assert as_bytes(view) == as_bytes(expected.view(l1.spec.shape)[1:, 0].transpose(0, 1))
    del view
    assert l1.counters.pinned_blocks == 0
    assert l1.counters.leases_dropped == 1
    assert len(put(l1, chain("again", 4))) == 4


def test_a_numpy_view_of_a_tensor_keeps_the_block_too(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 2)
    put(l1, key)
    array = acquire(l1, key).tensors[0].view(torch.uint8).numpy()
    assert l1.counters.pinned_blocks == 1

    del array
    assert l1.counters.pinned_blocks == 0
    assert l1.counters.leases_dropped == 1


def test_a_lease_dropped_before_its_tensors_were_built_comes_back(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)
    acquire(l1, key)

    assert len(l1.reserve(4)) == 4  # the very next call takes the blocks back
    assert l1.counters.leases_dropped == 1


def test_a_lease_in_a_reference_cycle_comes_back(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)
    cycle: list[object] = [acquire(l1, key)]
    cycle += [cycle, cycle[0].tensors]  # type: ignore[attr-defined]
    del cycle
    gc.collect()

    assert l1.counters.pinned_blocks == 0
    assert l1.counters.leases_dropped == 1


def test_release_while_another_call_holds_the_lock_does_not_wait(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    """A finalizer may release a lease inside L1's own critical section, where waiting is a deadlock."""
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)
    lease = acquire(l1, key)
    with l1._lock:
        lease.release()
    assert len(l1.reserve(4)) == 4
    assert l1.counters.leases_dropped == 0


def test_views_dying_in_other_threads_lose_no_pin(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(8), chain("a", 8)
    put(l1, key)
    shared = [list(acquire(l1, key).tensors) for _ in range(20)]

    def drop(tensors: list[torch.Tensor]) -> None:
        while tensors:
            tensors.pop()
            l1.leading(key)

    threads = [threading.Thread(target=drop, args=(tensors,)) for tensors in shared for _ in range(2)]
    del shared
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads, thread

    assert l1.counters.pinned_blocks == 0
    assert l1.counters.leases_dropped == 20


def test_two_leases_of_a_block_see_the_same_memory(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 1)
    put(l1, key)
    with acquire(l1, key) as one, acquire(l1, key) as two:
        assert one.tensors[0].data_ptr() == two.tensors[0].data_ptr()
        assert one.tensors[0] is one.tensors[0]


def test_a_leased_block_survives_delete_clear_and_refill(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(6), chain("a", 2)
    put(l1, key)
    lease = acquire(l1, key)
    l1.delete(key[:1])
    l1.clear()
    put(l1, key)
    for i in range(10):
        put(l1, chain(str(i), 6))

    assert [as_bytes(t) for t in lease.tensors] == [content(d, l1.spec.nbytes).tobytes() for d in key]
    lease.release()
    assert l1.counters.pinned_blocks == 0
    assert len(put(l1, chain("all", 6))) == 6


def test_tensors_outlive_a_closed_cache(make_l1: MakeL1, chain: Chain, put: Put, content: Content) -> None:
    l1, key = make_l1(4), chain("a", 2)
    put(l1, key)
    lease = acquire(l1, key)
    tensors = lease.tensors
    l1.close()

    assert as_bytes(tensors[1]) == content(key[1], l1.spec.nbytes).tobytes()
    lease.release()
    assert l1.counters.pinned_blocks == 0


def test_an_empty_lease_is_no_drop(make_l1: MakeL1, chain: Chain) -> None:
    l1 = make_l1(4)
    lease = acquire(l1, chain("absent", 2))
    assert lease.blocks == 0
    assert lease.tensors == ()
    del lease
    acquire(l1, chain("absent", 2))

    assert l1.counters.leases_dropped == 0


def test_real_kv_blocks_are_leased_bit_for_bit(chain: Chain) -> None:
    block = np.load(Path(__file__).parents[2] / "data" / "fp8e4m3_prose_b032_16tok_LCND.npy")
    spec = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="float8_e4m3fn")
    l1 = L1Cache(spec, spec.nbytes + 8192, lambda _: PrefixLruPolicy())
    slots = l1.reserve(1)
    l1.pool.payload(slots[0])[:] = block.reshape(-1)
    with Lease(l1, l1.publish([(chain("a", 1)[0], None)], slots, pins=1)) as lease:
        assert lease.tensors[0].dtype is torch.float8_e4m3fn
        assert as_bytes(lease.tensors[0]) == block.tobytes()
    l1.close()

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore.errors import CapacityError, ClosedError, ConfigError
from kvstore.l1.device import BlockPool, TorchDevicePool, resolve_device
from kvstore.l1.device_cache import DeviceCache
from kvstore.l1.pool import SlabPool
from kvstore.spec import BlockSpec

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")

DEVICES = [
    "slab",
    "cpu",
    pytest.param(
        "cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
    ),
]


@pytest.fixture(params=DEVICES)
def pool(request: pytest.FixtureRequest) -> BlockPool[Any]:
    made: BlockPool[Any]
    made = SlabPool(5000, 1 << 20) if request.param == "slab" else TorchDevicePool(request.param, 5000, 1 << 20)
    assert isinstance(made, SlabPool) == (request.param == "slab")
    return made


def test_copies_in_and_out_are_bit_exact(pool: BlockPool[Any]) -> None:
    blocks = [torch.randint(0, 256, (5000,), dtype=torch.uint8) for _ in range(4)]
    slots = []
    for block in blocks:
        slot = pool.allocate()
        assert slot is not None
        slots.append(slot)
        pool.copy_in(slot, block)

    for slot, block in zip(slots, blocks, strict=True):
        out = torch.zeros(5000, dtype=torch.uint8)
        pool.copy_out(slot, out)
        assert torch.equal(out, block)
        assert bytes(torch.as_tensor(pool.payload(slot)).cpu().numpy()) == bytes(block.numpy())


def test_every_slot_is_given_out_once(pool: BlockPool[Any]) -> None:
    slots = [pool.allocate() for _ in range(pool.n_slots)]

    assert sorted(s for s in slots if s is not None) == list(range(pool.n_slots))
    assert pool.allocate() is None
    pool.free(3)
    assert pool.allocate() == 3


def test_a_closed_pool_says_so(pool: BlockPool[Any]) -> None:
    pool.close()
    pool.close()

    with pytest.raises(ClosedError):
        pool.payload(0)


def test_a_device_pool_below_one_block_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"5000 bytes.*5120 bytes"):
        TorchDevicePool("cpu", 5000, 5000)


def test_a_device_pool_above_the_devices_memory_is_refused() -> None:
    with pytest.raises(CapacityError, match="cpu cannot give"):
        TorchDevicePool("cpu", 4096, 1 << 60)


@without_cuda
def test_cuda_without_cuda_is_a_config_error(spec: BlockSpec) -> None:
    with pytest.raises(ConfigError, match=r"l1.device is 'cuda:0' but torch.cuda is not available"):
        TorchDevicePool("cuda:0", 4096, 1 << 20)
    with pytest.raises(ConfigError, match=r"l1.device is 'cuda:1' but torch.cuda is not available"):
        DeviceCache.open("cuda:1", spec.nbytes, 1 << 20)


def test_an_unknown_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"l1.device is 'gpu0'; expected 'cpu'"):
        resolve_device("gpu0")


def test_host_memory_needs_no_device_pool(spec: BlockSpec) -> None:
    assert DeviceCache.open("cpu", spec.nbytes, 1 << 20) is None

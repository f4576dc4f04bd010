"""Kinds S14 and F8: what stays on a medium after a clear, and in the page cache after large writes."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import Namespace
from kvstore.spec import BlockSpec
from tests.faults.media import S3Store
from tests.faults.store import TIER, Store, over
from tests.support_faults import NAMESPACE, SMALL, WatchedCache, chain, noise, same, target

MARKER = b"the tenant's own words."
OTHER = Namespace(model="somebody else's", revision="r1")
LARGE = BlockSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 512 KiB


def marked(n_blocks: int) -> torch.Tensor:
    raw = (MARKER * (n_blocks * SMALL.nbytes // len(MARKER) + 1))[: n_blocks * SMALL.nbytes]
    shape = (n_blocks, *SMALL.shape)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(SMALL.torch_dtype()).view(shape)


def marks(store: Store) -> int:
    """How often the marker can be read on the medium."""
    if isinstance(store, S3Store):
        return sum(stored.body.count(MARKER) for stored in store._objects().values())
    return sum(path.read_bytes().count(MARKER) for path in store.root.rglob("*") if path.is_file())


def wait_until_gone(cache: WatchedCache, store: Store, more: Any = lambda: None) -> None:
    end = time.monotonic() + 40
    while marks(store) and time.monotonic() < end:
        more()
        time.sleep(0.05)
    assert marks(store) == 0


@over("TS")
def test_after_a_clear_nothing_of_the_blocks_can_be_read_on_the_medium(store: Store) -> None:
    with store.open(namespace=OTHER) as neighbour, store.open(l1="4MiB") as cache:
        neighbour.store(chain(3), noise(SMALL, range(3)))
        cache.store(chain(6), marked(6))
        assert marks(store) > 1000
        cache.clear()
        assert cache.get(chain(6), target(SMALL, 6)) == 0
        wait_until_gone(cache, store)
        out = target(SMALL, 3)
        assert neighbour.get(chain(3), out) == 3
        assert same(out, noise(SMALL, range(3)))


@over("LN")
def test_after_a_clear_blocks_are_out_of_reach_and_their_space_is_used_again(store: Store) -> None:
    """Pages and regions are not overwritten for its own sake; what is stored next overwrites them."""
    small: dict[str, Any] = {"capacity": "8MiB"}
    with store.open(**small) as cache:
        cache.store(chain(6), marked(6))
        assert marks(store) > 1000
        cache.clear()
        assert cache.get(chain(6), target(SMALL, 6)) == 0
        assert cache.lookup(chain(6)).blocks == 0
        seeds = iter(range(1, 10_000))

        def fill() -> None:
            seed = next(seeds)
            cache.put(chain(16, seed=seed), noise(SMALL, range(16 * seed, 16 * seed + 16)))
            cache.flush(60)

        wait_until_gone(cache, store, fill)
    with store.open(**small) as cache:
        assert cache.get(chain(6), target(SMALL, 6)) == 0


def resident_fraction(path: Path) -> float:
    """Part of a file that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    nbytes = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-nbytes // 4096))()
    fd = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, nbytes, 1, 1, fd, 0)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    finally:
        os.close(fd)
    return sum(page & 1 for page in pages) / len(pages)


@over("N")
def test_large_writes_leave_the_page_cache_to_others(store: Store) -> None:
    """48 MiB written and read past the page cache stay out of it; without the option they fill it."""
    resident = {}
    for direct in (True, False):
        place = type(store)(store.root.with_name(f"direct-{direct}"))
        try:
            opened = place.open(spec=LARGE, namespace=NAMESPACE, capacity="64MiB", direct=direct)
        except Exception as e:  # noqa: BLE001 - whatever a file system without O_DIRECT makes of it
            pytest.skip(f"needs a file system with O_DIRECT: {e}")
        with opened as cache:
            for i in range(6):
                cache.store(chain(16, seed=i, spec=LARGE), noise(LARGE, [i]).expand(16, *LARGE.shape))
            assert cache.tier(TIER).counters.stored == 96
            assert cache.get(chain(16, spec=LARGE), target(LARGE, 16)) == 16
        segments = sorted(place.root.glob("seg-*"))
        resident[direct] = sum(map(resident_fraction, segments)) / len(segments)
    assert resident[True] < 0.2
    assert resident[False] > 0.5

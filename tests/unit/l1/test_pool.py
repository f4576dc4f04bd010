from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import CapacityError, ClosedError, ConfigError
from kvstore.l1.limits import MemoryLimit, check_capacity, memory_limits
from kvstore.l1.pool import HEADER_BYTES, SlabPool

MIB = 1 << 20


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 64 << 10, (2 << 20) - 1])
def test_slots_with_their_headers_never_exceed_the_budget(block_bytes: int) -> None:
    capacity = 5 * MIB + 123
    pool = SlabPool(block_bytes, capacity)

    assert pool.stride % 4096 == 0
    assert pool.stride >= HEADER_BYTES + block_bytes
    assert pool.n_slots * pool.stride <= capacity < (pool.n_slots + 1) * pool.stride
    assert len([pool.allocate() for _ in range(pool.n_slots)]) == pool.n_slots
    assert pool.allocate() is None


def test_a_full_pool_takes_what_was_configured() -> None:
    capacity = 64 * MIB
    before = rss_bytes()
    pool = SlabPool(2 * MIB, capacity)
    assert rss_bytes() - before < capacity // 10, "memory was touched before use"

    while (slot := pool.allocate()) is not None:
        pool.payload(slot)[:] = 7
        pool.view(slot)[:HEADER_BYTES] = b"h" * HEADER_BYTES

    assert 0.9 * capacity < rss_bytes() - before <= 1.1 * capacity


def test_populate_takes_the_memory_at_open() -> None:
    probe = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        probe.madvise(23)
    except OSError:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    before = rss_bytes()
    pool = SlabPool(2 * MIB, 96 * MIB, populate=True)

    assert rss_bytes() - before > 0.9 * pool.n_slots * pool.stride


def test_the_slab_starts_on_a_huge_page_and_blocks_on_pages() -> None:
    pool = SlabPool(5000, MIB)

    assert (address(pool.payload(0)) - HEADER_BYTES) % (2 * MIB) == 0
    for slot in range(pool.n_slots):
        assert address(pool.payload(slot)) % 4096 == 0


def test_a_record_head_is_contiguous_with_its_block() -> None:
    pool = SlabPool(5000, MIB)
    slot = pool.allocate()
    assert slot is not None
    view = pool.view(slot)
    view[HEADER_BYTES - 4 : HEADER_BYTES + 4] = b"headbloc"

    assert view.nbytes == pool.stride
    assert bytes(pool.payload(slot)[:4]) == b"bloc"
    assert pool.payload(slot).shape == (5000,)


def test_slots_do_not_overlap() -> None:
    pool = SlabPool(4096, MIB)
    for slot in range(pool.n_slots):
        pool.view(slot)[:] = bytes([slot % 251]) * pool.stride

    for slot in range(pool.n_slots):
        assert set(bytes(pool.view(slot))) == {slot % 251}


def test_the_slot_freed_last_is_given_out_first() -> None:
    pool = SlabPool(4096, MIB)
    slots = [pool.allocate() for _ in range(3)]
    assert slots == [0, 1, 2]
    pool.free(1)

    assert pool.n_free == pool.n_slots - 2
    assert pool.allocate() == 1
    assert pool.allocate() == 3


def test_freeing_a_slot_twice_is_refused() -> None:
    pool = SlabPool(4096, MIB)
    slot = pool.allocate()
    assert slot is not None
    pool.free(slot)

    with pytest.raises(ValueError, match="freed twice"):
        pool.free(slot)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(pool.n_slots - 1)


def test_a_capacity_below_one_slot_names_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"1000000 bytes.*2101248 bytes"):
        SlabPool(2 * MIB, 1_000_000)


def test_a_capacity_above_physical_memory_names_option_and_both_numbers() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    with pytest.raises(ConfigError, match=rf"l1.capacity is {1 << 60} bytes.*host RAM.* is \d+ bytes") as caught:
        SlabPool(4096, 1 << 60)
    assert any(limit.nbytes == physical for limit in memory_limits())
    assert int(str(caught.value).split(" is ")[-1].split()[0]) <= physical


def test_a_capacity_above_the_address_space_limit_is_refused() -> None:
    script = """
        import resource
        from kvstore.errors import ConfigError
        from kvstore.l1.pool import SlabPool
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        for capacity in (3 << 30, (2 << 30) - 4096):  # above the limit; above what is left of it
            try:
                SlabPool(4096, capacity)
            except ConfigError as e:
                print(e)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    above, refused = done.stdout.splitlines()
    assert f"l1.capacity is {3 << 30} bytes" in above
    assert f"RLIMIT_AS (ulimit -v) is {2 << 30} bytes" in above
    assert f"l1.capacity is {(2 << 30) - 4096} bytes, which this host refused to map" in refused


def test_cgroup_limits_of_both_versions_and_of_ancestors_are_found(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/pod/box\n8:memory,hugetlb:/docker/x\n3:cpuset:/\n7:memory:/../up\n")
    for name, text in {
        "pod/box/memory.max": "max\n",
        "pod/memory.max": "536870912\n",
        "memory/docker/x/memory.limit_in_bytes": "1073741824\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    limits = memory_limits(tmp_path / "cgroup", tmp_path)

    assert MemoryLimit("cgroup limit memory.max", 536870912) in limits
    assert MemoryLimit("cgroup limit memory.limit_in_bytes", 1073741824) in limits
    with pytest.raises(ConfigError, match=r"l1.capacity is 536870913 bytes.*memory.max is 536870912 bytes"):
        check_capacity(536870913, limits)
    check_capacity(536870912, limits)


def test_a_host_without_cgroups_has_physical_memory_only(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "none", tmp_path)[0].name == "physical memory"


def test_arrays_outlive_close() -> None:
    pool = SlabPool(4096, MIB)
    slot = pool.allocate()
    assert slot is not None
    array = pool.payload(slot)
    array[:] = 9
    pool.close()
    pool.close()

    assert array.tobytes() == b"\x09" * 4096
    with pytest.raises(ClosedError, match="closed"):
        pool.payload(slot)
    with pytest.raises(ClosedError, match="closed"):
        pool.view(slot)


def test_close_gives_the_memory_back_with_the_last_array() -> None:
    before = rss_bytes()
    pool = SlabPool(32 * MIB, 33 * MIB)
    array = pool.payload(0)
    array[:] = 1
    pool.close()
    assert rss_bytes() - before > 30 * MIB

    del array
    assert rss_bytes() - before < 8 * MIB


def test_a_forked_child_does_not_write_into_its_parents_blocks() -> None:
    script = """
        import os
        from kvstore.l1.pool import SlabPool
        pool = SlabPool(4096, 1 << 20)
        pool.payload(0)[:] = 1
        child = os.fork()
        if child == 0:
            pool.payload(0)[:] = 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(set(pool.payload(0).tolist()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{1}"

"""The storage backend as SGLang loads and uses it: its own factory, host pools and transfer descriptors."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (make test-engines)", allow_module_level=True)

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.engine_hashes import sglang_page_hashes
from kvstore.errors import ConfigError, NotSupportedError
from kvstore.objects.naming import holds_records
from tests.engines.sglang import rig
from tests.engines.sglang.conftest import ConfigOf, OpenBackend
from tests.engines.sglang.rig import PAGE, content, hashes, pages, scramble, wipe

pytestmark = pytest.mark.engine

POOLS: dict[str, Callable[[], Any]] = {
    "page_first": rig.mha_pool,
    "layer_first": lambda: rig.mha_pool("layer_first"),
    "page_first_direct": lambda: rig.mha_pool("page_first_direct"),
    "page_head": lambda: rig.mha_pool("page_head"),
    "float8": lambda: rig.mha_pool(dtype=torch.float8_e4m3fn),
    "lopsided": lambda: rig.mha_pool(v_head_dim=4),
    "mla": rig.mla_pool,
    "mla layer_first": lambda: rig.mla_pool("layer_first"),
    "mla page_first_direct": lambda: rig.mla_pool("page_first_direct"),
}


def as_bytes(page: torch.Tensor) -> bytes:
    return bytes(page.contiguous().view(torch.uint8).numpy().tobytes())


def damage(folder: Path) -> int:
    """Flip a bit in the middle of one record of a tree; returns how many records there are."""
    records = sorted(file for file in folder.rglob("*") if holds_records(file.relative_to(folder).as_posix()))
    data = bytearray(records[-1].read_bytes())
    data[len(data) // 2] ^= 1
    records[-1].write_bytes(data)
    return len(records)


def test_pages_round_trip_through_all_three_interfaces(
    medium: str, config_of: ConfigOf, open_backend: OpenBackend
) -> None:
    """v1 stores, v1, generic and v2 read in a backend of its own, all of them the same bytes."""
    pool = rig.mha_pool()
    scramble(pool)
    before = content(pool)
    flat = [as_bytes(pool.get_data_page(number * PAGE)) for number in range(16)]
    config = config_of(medium)
    first = open_backend({"config": config}, ("kv", pool))
    assert type(first).__mro__[1] is rig.hicache_storage.HiCacheStorage
    names = hashes(16)
    assert first.batch_exists(names) == 0
    assert first.batch_set_v1(names[:8], pages(*range(8))) == [True] * 8
    assert first.batch_set(names[8:12], [pool.get_data_page(number * PAGE) for number in range(8, 12)])
    transfer = rig.hicache_storage.PoolTransfer(
        name=rig.hicache_storage.PoolName.KV, keys=names[12:], host_indices=pages(*range(12, 16))
    )
    assert first.batch_set_v2([transfer]) == {"kv": [True] * 4}
    first.close()
    wipe(pool)

    second = open_backend({"config": config}, ("kv", pool))
    assert second.batch_exists([*names, *hashes(1, first=99)]) == 16
    assert second.batch_get_v1(names[:8], pages(*range(8))) == [True] * 8
    got = second.batch_get(names[8:12], [pool.get_dummy_flat_data_page() for _ in range(4)])
    assert [as_bytes(page) for page in got] == flat[8:12]
    for number, page in enumerate(got, 8):
        pool.set_from_flat_data_page(number * PAGE, page)
    assert second.batch_get_v2([transfer]) == {"kv": [True] * 4}
    assert content(pool) == before
    assert second.exists(names[0])
    assert as_bytes(second.get(names[3])) == flat[3]
    second.clear()
    assert second.batch_exists(names) == 0


@pytest.mark.parametrize("name", POOLS)
def test_every_layout_of_sglangs_pools_round_trips(name: str, config_of: ConfigOf, open_backend: OpenBackend) -> None:
    pool = POOLS[name]()
    scramble(pool)
    before = content(pool)
    backend = open_backend({"config": config_of("lmdb")}, ("kv", pool), is_mla_model=name.startswith("mla"))
    names = hashes(16)
    assert backend.batch_set_v1(names, pages(*range(16))) == [True] * 16
    backend.flush(20)
    if name != "lopsided":  # whose pool has no flat pages
        expected = [as_bytes(pool.get_data_page(number * PAGE)) for number in range(16)]
        got = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
        assert [as_bytes(page) for page in got] == expected
    wipe(pool)
    assert backend.batch_get_v1(names, pages(*range(16))) == [True] * 16
    assert content(pool) == before


def test_a_page_may_be_stored_with_its_axes(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    """As SGLang's own test of a storage backend does: unflattened values, keys of any text, a later part alone."""
    pool = rig.mha_pool("layer_first")
    backend = open_backend({"config": config_of("lmdb")}, ("kv", pool))
    names = [f"hash{i}" for i in range(4)]
    values = [torch.rand(2, 2, PAGE, 3, 8).to(torch.bfloat16) for _ in names]
    assert backend.batch_exists(names) == 0
    assert backend.batch_set(names, values)
    backend.flush(20)
    assert (backend.batch_exists(names), backend.batch_exists(names[2:])) == (4, 2)
    targets = [torch.rand(2, 2, PAGE, 3, 8).to(torch.bfloat16).flatten() for _ in range(2)]
    backend.batch_get(names[2:], targets)
    assert [as_bytes(t) for t in targets] == [as_bytes(v) for v in values[2:]]


def test_a_partial_hit_gives_the_good_prefix(medium: str, config_of: ConfigOf, open_backend: OpenBackend) -> None:
    pool = rig.mha_pool()
    scramble(pool)
    backend = open_backend({"config": config_of(medium)}, ("kv", pool))
    names = hashes(6)
    backend.batch_set_v1(names[:3], pages(0, 1, 2))
    backend.batch_set_v1(names[4:], pages(4, 5))
    backend.flush(20)
    expected = [as_bytes(pool.get_data_page(number * PAGE)) for number in range(3)]
    wipe(pool)
    assert backend.batch_exists(names) == 3
    assert backend.batch_get_v1(names, pages(*range(10, 16))) == [True] * 3 + [False] * 3
    assert [as_bytes(pool.get_data_page(number * PAGE)) for number in (10, 11, 12)] == expected
    assert not any(any(as_bytes(pool.get_data_page(number * PAGE))) for number in (13, 14, 15))
    got = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    assert [page is None for page in got] == [False] * 3 + [True] * 3


def test_a_corrupt_page_is_a_miss_and_can_be_stored_anew(
    tmp_path: Path, config_of: ConfigOf, open_backend: OpenBackend
) -> None:
    pool = rig.mha_pool()
    scramble(pool)
    backend = open_backend({"config": config_of("nvme", layout="tree", pack=1)}, ("kv", pool))
    names = hashes(4)
    backend.batch_set_v1(names, pages(0, 1, 2, 3))
    backend.flush(20)
    before = content(pool)
    assert damage(tmp_path / "nvme") == 4
    wipe(pool)
    results = backend.batch_get_v1(names, pages(0, 1, 2, 3))
    good = results.index(False)
    assert results == [True] * good + [False] * (4 - good)
    scramble(pool)
    assert content(pool) == before
    assert backend.batch_exists(names) == good  # the bad record is gone
    assert backend.batch_set_v1(names, pages(0, 1, 2, 3)) == [True] * 4
    backend.flush(20)
    wipe(pool)
    assert backend.batch_get_v1(names, pages(0, 1, 2, 3)) == [True] * 4
    scramble(reference := rig.mha_pool())
    assert [as_bytes(pool.get_data_page(n * PAGE)) for n in range(4)] == [
        as_bytes(reference.get_data_page(n * PAGE)) for n in range(4)
    ]


def test_a_hybrid_models_transfers(medium: str, config_of: ConfigOf, open_backend: OpenBackend) -> None:
    """KV, a sliding window and recurrent states: each pool limits the prefix in its own way."""
    storage = rig.hicache_storage
    kv, swa, states = rig.mha_pool(), rig.mha_pool("page_first_direct"), rig.mamba_pool()
    for seed, pool in enumerate((kv, swa, states)):
        scramble(pool, seed)
    backend = open_backend({"config": config_of(medium)}, ("kv", kv), ("swa", swa), ("mamba", states))
    names = hashes(8)

    def transfer(pool: str, keys: list[str], indices: torch.Tensor, policy: str = "TRAILING_PAGES") -> Any:
        return storage.PoolTransfer(
            name=storage.PoolName(pool),
            keys=keys,
            host_indices=indices,
            hit_policy=storage.PoolHitPolicy[policy],
        )

    assert backend.batch_set_v1(names, pages(*range(8))) == [True] * 8
    stored = backend.batch_set_v2(
        [
            transfer("swa", names[3:6], pages(3, 4, 5)),
            transfer("mamba", [names[4]], pages(1, each=1)),
            transfer("mamba", [names[6]], pages(2, each=1)),
        ]
    )
    assert stored == {"swa": [True] * 3, "mamba": [True]}
    backend.flush(20)
    window = transfer("swa", ["?", "?"], pages(0, 1))
    state = transfer("mamba", ["?"], pages(0, each=1))
    found = backend.batch_exists_v2(names, [window, state])
    assert isinstance(found, storage.PoolTransferResult)
    # windows of two end at 5 and 6, states at 5 and 7
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [5])
    assert found.extra_pool_hit_pages == {"kv": 8, "swa": 6, "mamba": 7}
    everywhere = backend.batch_exists_v2(names, [transfer("swa", names, pages(0), "ALL_PAGES")])
    assert (everywhere.kv_hit_pages, everywhere.restorable_prefix_pages) == (0, [])
    assert backend.batch_exists_v2(hashes(2, first=99), [state]).kv_hit_pages == 0

    expected = [as_bytes(states.get_data_page(1)), as_bytes(swa.get_data_page(4 * PAGE))]
    wipe(states)
    wipe(swa)
    loaded = backend.batch_get_v2(
        [transfer("swa", names[3:5], pages(7, 8)), transfer("mamba", [names[4]], pages(9, each=1))]
    )
    assert loaded == {"swa": [True, True], "mamba": [True]}
    assert [as_bytes(states.get_data_page(9)), as_bytes(swa.get_data_page(8 * PAGE))] == expected
    short = transfer("mamba", [names[4], names[6]], pages(0, each=1))  # fewer indices than keys
    assert backend.batch_get_v2([short]) == {"mamba": [False, False]}


def test_a_logical_anchor_has_nothing_to_store(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    anchor = rig.LogicalHostPool(16 * PAGE, PAGE)
    states = rig.mamba_pool()
    scramble(states)
    backend = open_backend({"config": config_of("lmdb")}, ("kv", anchor), ("mamba", states))
    storage = rig.hicache_storage
    names = hashes(4)
    assert backend.batch_set_v1(names, pages(0, 1, 2, 3)) == [True] * 4
    transfer = storage.PoolTransfer(
        name=storage.PoolName.MAMBA,
        keys=names[1:2],
        host_indices=pages(0, each=1),
        hit_policy=storage.PoolHitPolicy.TRAILING_PAGES,
    )
    backend.batch_set_v2([transfer])
    backend.flush(20)
    assert backend.batch_exists_v2(names, [transfer]).restorable_prefix_pages == [2]
    assert backend.batch_get_v1(names[:2], pages(0, 1)) == [True, True]


def test_pages_before_the_keys_put_neighbours_into_one_object(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    """With ``hicache_storage_pass_prefix_keys`` kvstore knows where pages stand, and packs them on S3."""
    pool = rig.mha_pool()
    scramble(pool)
    before = content(pool)
    names = hashes(16)
    config = config_of("s3")
    extra = [rig.hicache_storage.HiCacheStorageExtraInfo(prefix_keys=keys) for keys in ([], names[:8])]
    backend = open_backend({"config": config}, ("kv", pool))
    assert backend.batch_set_v1(names[:8], pages(*range(8)), extra[0]) == [True] * 8
    assert backend.batch_set_v1(names[8:], pages(*range(8, 16)), extra[1]) == [True] * 8
    backend.close()
    wipe(pool)
    fresh = open_backend({"config": config}, ("kv", pool))
    assert fresh.batch_exists(names, extra[0]) == 16
    assert fresh.batch_get_v1(names[:8], pages(*range(8)), extra[0]) == [True] * 8
    assert fresh.batch_get_v1(names[8:], pages(*range(8, 16)), extra[1]) == [True] * 8
    assert content(pool) == before
    assert fresh.kvstore_stats()["kv"]["tiers"][0]["counters"]["hits"] == 16


def test_a_plain_script_finds_what_sglang_stored_and_the_other_way_round(
    config_of: ConfigOf, open_backend: OpenBackend
) -> None:
    tokens = [(i * 7919 + 13) % 32_000 for i in range(4 * PAGE)]
    names = rig.utils.get_hash_str(tokens, None, page_size=PAGE)
    assert names == sglang_page_hashes(tokens, page_tokens=PAGE)
    config = config_of("lmdb")
    pool = rig.mha_pool()
    scramble(pool)
    backend = open_backend({"config": config, "model": "org/demo", "revision": "abc"}, ("kv", pool))
    backend.batch_set_v1(names[:2], pages(0, 1))
    backend.flush(20)

    spec = BlockSpec(layers=2, kv_heads=3, head_dim=8, block_tokens=PAGE, dtype="bfloat16", layout="CNLD")
    key = KVCacheKey.from_block_hashes(
        sglang_page_hashes(tokens, page_tokens=PAGE), block_tokens=PAGE, chained=True, prefix=[]
    )
    with KVCache.open(config, spec=spec, namespace=Namespace(model="org/demo", revision="abc")) as cache:
        out = torch.zeros(4, *spec.shape, dtype=torch.bfloat16)
        assert cache.get(key, out) == 2
        assert [as_bytes(block) for block in out[:2]] == [as_bytes(pool.get_data_page(n * PAGE)) for n in (0, 1)]
        cache.put(key.suffix(2), out[:2])
        cache.flush(20)
    assert backend.batch_get_v1(names, pages(4, 5, 6, 7)) == [True] * 4
    assert as_bytes(pool.get_data_page(6 * PAGE)) == as_bytes(pool.get_data_page(0))


def test_before_a_pool_is_registered_everything_is_a_miss(config_of: ConfigOf) -> None:
    config = rig.storage_config({"config": config_of("lmdb")})
    backend = rig.StorageBackendFactory.create_backend("dynamic", config, None)
    assert backend.batch_exists(hashes(2)) == 0
    assert backend.batch_get_v1(hashes(2), pages(0, 1)) == [False, False]
    assert backend.batch_set_v1(hashes(2), pages(0, 1)) == [False, False]
    assert backend.get(hashes(1)[0]) is None
    assert not backend.set(hashes(1)[0], torch.zeros(1))
    backend.clear()
    backend.close()


def test_what_is_wrong_is_said_when_the_backend_is_made(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    with pytest.raises(ConfigError, match="did you mean 'capacity'"):
        open_backend({"config": config_of("lmdb", capcity="1MiB")})
    with pytest.raises(ConfigError, match="expected the path of a TOML file"):
        open_backend({"config": 7})
    unified = rig.mha_pool("page_unified")
    with pytest.raises(NotSupportedError, match="layout 'page_unified'"):
        open_backend({"config": config_of("lmdb")}, ("kv", unified))


def test_metrics_are_sglangs_and_are_told_once(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    pool = rig.mha_pool()
    backend = open_backend({"config": config_of("lmdb")}, ("kv", pool))
    backend.batch_set_v1(hashes(3), pages(0, 1, 2))
    backend.flush(20)
    backend.batch_get_v1(hashes(4), pages(0, 1, 2, 3))
    told = backend.get_stats()
    assert isinstance(told, rig.StorageMetrics)
    assert (told.prefetch_pgs, told.backup_pgs) == ([3], [3])
    assert all(speed > 0 for speed in told.prefetch_bandwidth + told.backup_bandwidth)
    assert backend.get_stats() == rig.StorageMetrics()


def test_replicas_of_latents_read_what_rank_0_wrote(config_of: ConfigOf, open_backend: OpenBackend) -> None:
    config = {"config": config_of("lmdb")}
    pools = [rig.mla_pool(), rig.mla_pool()]
    scramble(pools[0])
    writer, reader = (
        open_backend(config, ("kv", pool), is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, pool in enumerate(pools)
    )
    assert reader.batch_set_v1(hashes(2), pages(0, 1)) == [True, True]
    assert writer.batch_exists(hashes(2)) == 0
    writer.batch_set_v1(hashes(2), pages(0, 1))
    writer.flush(20)
    assert reader.batch_get_v1(hashes(2), pages(0, 1)) == [True, True]
    assert as_bytes(pools[1].get_data_page(PAGE)) == as_bytes(pools[0].get_data_page(PAGE))

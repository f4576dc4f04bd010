"""Misuse of the data calls: each with a text that says what, which value and what to do."""

from __future__ import annotations

import re

import pytest
import torch

from kvstore import BlockSpec, CapacityError, ConfigError, KeyMismatchError, KVCache, Namespace, SpecMismatchError
from tests.support import MakeKey, OpenCache, blocks_of


@pytest.fixture
def cache(open_cache: OpenCache) -> KVCache:
    return open_cache({"l1": {"capacity": "1MiB"}})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda b: b[:2], "blocks has shape (2, 4, 2, 16, 2, 64); expected (3, 4, 2, 16, 2, 64)"),
        (lambda b: b.float(), "blocks has dtype float32; expected bfloat16"),
        (lambda b: b.view(torch.float16), "blocks has dtype float16; expected bfloat16"),
        (lambda b: list(b[:2]), "blocks holds 2 tensors, but the key has 3 blocks"),
        (lambda b: [b[0], b[1], b[2].float()], "blocks[2] has dtype float32"),
        (lambda b: [b[0], b[1, 0], b[2]], "blocks[1] has shape (2, 16, 2, 64); expected (4, 2, 16, 2, 64)"),
        (lambda b: b.float().numpy(), "blocks is a ndarray; expected a tensor"),
        (lambda b: [b[0], None, b[2]], "blocks[1] is a NoneType; expected a torch.Tensor"),
    ],
)
def test_wrong_blocks_are_refused_before_any_tier_is_touched(
    cache: KVCache, spec: BlockSpec, make_key: MakeKey, wrong: object, text: str
) -> None:
    assert callable(wrong)
    with pytest.raises(SpecMismatchError, match=re.escape(text)):
        cache.put(make_key(3), wrong(blocks_of(spec, 3)))
    assert cache.stats().cache.puts == 0


def test_an_expanded_destination_is_refused(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    out = torch.zeros((1, *spec.shape), dtype=torch.bfloat16).expand(3, *spec.shape)

    with pytest.raises(SpecMismatchError, match="expanded tensor whose elements share memory"):
        cache.get(make_key(3), out)


def test_a_key_of_another_block_size_is_refused(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key = make_key(2, block_tokens=32)

    text = "the key has blocks of 32 tokens, this cache of 16; make it with block_tokens=16"
    for call in (cache.lookup, cache.acquire, cache.delete, cache.contains_each, cache.prefetch):
        with pytest.raises(KeyMismatchError, match=re.escape(text)):
            call(key)
    with pytest.raises(KeyMismatchError, match=re.escape(text)):
        cache.put(key, blocks_of(spec, 2))


def test_something_that_is_no_key_is_refused(cache: KVCache) -> None:
    with pytest.raises(KeyMismatchError, match=re.escape("expected a KVCacheKey, got list")):
        cache.lookup([1, 2, 3])  # type: ignore[arg-type]


def test_a_finer_key_fits_after_coarsening(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    fine = make_key(8, block_tokens=4)

    assert cache.put(fine.coarsen(4), blocks_of(spec, 2)) == 2
    assert cache.lookup(fine.coarsen(4)).blocks == 2


def test_a_key_longer_than_l1_cannot_be_allocated(cache: KVCache, make_key: MakeKey) -> None:
    with pytest.raises(CapacityError, match=r"allocate\(\) of 100 blocks, but L1 has 28 slots"):
        cache.allocate(make_key(100))


def test_an_l1_smaller_than_a_block_is_refused_at_open(spec: BlockSpec, namespace: Namespace) -> None:
    with pytest.raises(CapacityError, match=r"l1\.capacity is 10000 bytes but one block slot takes 36864 bytes"):
        KVCache.open({"l1": {"capacity": 10000}}, spec=spec, namespace=namespace)


def test_a_namespace_without_revision_warns(spec: BlockSpec, caplog: pytest.LogCaptureFixture) -> None:
    with KVCache.open({"l1": {"capacity": "1MiB"}}, spec=spec, namespace=Namespace(model="m")):
        pass
    assert "has no revision" in caplog.text


def test_nothing_is_created_on_disk_when_the_config_is_wrong(
    spec: BlockSpec, namespace: Namespace, tmp_path: object
) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path)) / "store"
    config = {"l2": [{"backend": "lmdb", "path": str(folder)}, {"backend": "lmdb", "paht": "x"}]}
    with pytest.raises(ConfigError):
        KVCache.open(config, spec=spec, namespace=namespace)
    assert not folder.exists()

"""Blocks with gaps, such as K and V of an engine's page, filled from a medium whose memory is read only."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint8"])
def test_a_raw_record_of_a_map_is_copied_straight_into_a_tensor_with_gaps(tmp_path: Path, dtype: str) -> None:
    spec = BlockSpec(layers=2, kv_heads=3, head_dim=8, block_tokens=4, dtype=dtype, layout="CNLD")
    config = {
        "l1": {"enabled": False},
        "l2": [{"backend": "lmdb", "path": str(tmp_path), "codec": "none", "capacity": "16MiB"}],
    }
    raw = torch.randint(0, 256, (2, 4 * 5, 2, 3, 8 * spec.itemsize), dtype=torch.uint8)
    pool = raw.view(spec.torch_dtype())
    pages = [pool[:, 4 * i : 4 * i + 4] for i in range(5)]
    key = KVCacheKey.from_tokens(range(20), block_tokens=4)
    with KVCache.open(config, spec=spec, namespace=Namespace(model="m", revision="r")) as cache:
        assert cache.put(key, pages) == 5
        cache.flush(10)
        target = torch.zeros_like(raw).view(spec.torch_dtype())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cache.get(key, [target[:, 4 * i : 4 * i + 4] for i in range(5)]) == 5
    assert torch.equal(target.view(torch.uint8), raw)

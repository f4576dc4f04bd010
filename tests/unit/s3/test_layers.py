"""Layer-wise restore from a bucket: ranged reads, no byte twice, the first layers before the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from tests.faults.s3_faults import S3FaultServer
from tests.support import same_bytes
from tests.support_s3 import CREDENTIALS
from tests.unit.s3.conftest import BUCKET

SPEC = BlockSpec(layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 2 MiB
N = 8
KEY = KVCacheKey.from_tokens(range(N * 16), block_tokens=16)
BLOCKS = torch.randn((N, *SPEC.shape), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.fixture(params=["none", "planes"])
def cache(request: pytest.FixtureRequest, faulty: S3FaultServer) -> Iterator[KVCache]:
    tier = {"backend": "s3", "bucket": BUCKET, "endpoint_url": faulty.url, "admit": "all", **CREDENTIALS}
    config = {"l1": {"enabled": False}, "l2": [{**tier, "codec": request.param}]}
    with KVCache.open(config, spec=SPEC, namespace=Namespace(model="m", revision="r")) as cache:
        assert cache.put(KEY, BLOCKS) == N
        cache.flush(20)
        faulty.log.clear()
        yield cache


def moved_bytes(server: S3FaultServer) -> int:
    """Bytes of bodies that the reads asked for, which have a range each."""
    total = 0
    for request in server.log:
        if request.method == "GET" and not request.path.endswith(("/", BUCKET)) and "epochs/" not in request.path:
            first, last = request.headers["range"].removeprefix("bytes=").split("-")
            total += int(last) - int(first) + 1
    return total


def test_layers_come_in_ranged_reads_and_no_byte_twice(cache: KVCache, faulty: S3FaultServer) -> None:
    stream = cache.stream(KEY)

    first = next(stream)
    rest = list(stream)

    assert (first.first_layer, first.n_layers, first.n_blocks) == (0, 16, N)
    assert same_bytes(torch.cat([g.tensor for g in [first, *rest]], dim=1), BLOCKS)
    assert moved_bytes(faulty) <= 1.05 * N * SPEC.nbytes

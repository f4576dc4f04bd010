"""One rank of two: ``python group_child.py RANK FILE FOLDER``; exits with 0 when all laws hold."""

from __future__ import annotations

import sys

import torch.distributed as dist

from kvstore import Namespace
from kvstore.compat import aibrix
from tests.unit.compat.rig import config_of, ids_of, own_memory, store, values


def main(rank: int, file: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    tiers = [{"backend": "lmdb", "path": folder, "capacity": "16MiB", "admit": "all"}]
    aibrix.configure({"l1": {"capacity": "1MiB"}, "l2": tiers}, namespace=Namespace(model="m", revision="r"))
    group = dist.group.WORLD
    assert group is not None
    cache = aibrix.GroupAwareKVCacheManager(config_of(heads=[2 * rank, 2 * rank + 1]), group)
    assert isinstance(cache, aibrix.BaseKVCacheManager)
    assert (cache.rank, cache.world_size) == (rank, 2)

    query = ids_of("hashes", 6)
    store(cache, None, query[: 8 + 8 * rank], first=10 * rank)  # rank 0 has 2 blocks, rank 1 has 4
    n_tokens, handle = cache.acquire(None, query).get()
    assert (n_tokens, values(handle.to_tensors())) == (8, [10 * rank, 10 * rank + 1])
    handle.release()
    memory, own = own_memory(cache, 6)
    assert cache.get(None, query, own).value == 8
    assert values(list(memory))[:2] == [10 * rank, 10 * rank + 1]
    assert cache.exists(None, query).value == 8 + 8 * rank  # speaks for its own rank

    lonely = ids_of("tokens", 3)
    if rank:
        store(cache, None, lonely)
    assert cache.acquire(None, lonely).is_not_found()
    assert cache.get(None, lonely, own_memory(cache, 3)[1]).is_not_found()
    assert cache.acquire(lonely[:3], lonely[3:7]).is_invalid()

    if rank:  # whatever fails on one rank is a miss on the others
        cache._store.acquire = lambda key: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    status = cache.acquire(None, query)
    assert status.is_error() if rank else status.is_not_found(), status
    cache.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

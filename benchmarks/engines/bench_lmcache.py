"""kvstore behind LMCache's remote backend, beside LMCache's own file connector and local disk, in one run.

Run it in an environment with LMCache (``make test-engines ENGINES=lmcache`` makes one):
``.venv-lmcache/bin/python benchmarks/engines/bench_lmcache.py [--dir DIR] [--rounds N]``.  Every figure is the best of
several interleaved rounds; on a shared machine trust the ratios.  Files stay in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LAYERS, HEADS, HEAD_DIM = 32, 8, 128  # 128 KiB a token in bfloat16
MODEL = "bench"
KVSTORE = {
    "module_path": "kvstore_lmcache.connector",
    "class_name": "KVStoreConnectorAdapter",
    "revision": "bench",
}


def tier(backend: str, path: Path, codec: str) -> dict[str, Any]:
    """A kvstore config with one tier."""
    return {"l2": [{"backend": backend, "path": str(path), "capacity": "8GiB", "codec": codec}]}


def kvstore(backend: str, codec: str) -> Callable[[Path], dict[str, Any]]:
    """Settings of LMCache with our plugin."""
    return lambda path: {
        "remote_storage_plugins": ["kvstore"],
        "extra_config": {f"remote_storage_plugin.kvstore.{name}": value for name, value in KVSTORE.items()}
        | {"remote_storage_plugin.kvstore.config": tier(backend, path, codec)},
    }


def files(path: Path) -> dict[str, Any]:
    """Settings of LMCache with its file connector."""
    extra = {"remote_storage_plugin.fs.base_path": str(path)}
    return {"remote_storage_plugins": ["fs"], "extra_config": extra}


def disk(path: Path) -> dict[str, Any]:
    """Settings of LMCache with its local disk backend."""
    return {"local_disk": str(path), "max_local_disk_size": 8.0}


PEERS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "LMCache fs": ("RemoteBackend-fs", files),
    "LMCache disk": ("LocalDiskBackend", disk),
    "kvstore lmdb": ("RemoteBackend-kvstore", kvstore("lmdb", "none")),
    "kvstore nvme": ("RemoteBackend-kvstore", kvstore("nvme", "none")),
    "kvstore planes": ("RemoteBackend-kvstore", kvstore("lmdb", "planes")),
}


class Peer:
    """A storage manager with one backend besides its memory."""

    def __init__(self, backend: str, settings: dict[str, Any], chunk_tokens: int, chunks: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.pin_monitor import PinMonitor
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self.key: Any = partial(CacheEngineKey, MODEL, 1, 0, dtype=torch.bfloat16)
        self.chunk_bytes = 2 * LAYERS * chunk_tokens * HEADS * HEAD_DIM * 2
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk_tokens,
            local_cpu=False,
            pre_caching_hash_algorithm="sha256_cbor",
            max_local_cpu_size=3 * chunks * self.chunk_bytes / 2**30,
            **settings,
        )
        shape = (LAYERS, 2, chunk_tokens, HEADS, HEAD_DIM)
        metadata = LMCacheMetadata(
            MODEL, 1, 1, 0, 0, kv_dtype=torch.bfloat16, kv_shape=shape, role="worker", chunk_size=chunk_tokens
        )
        PinMonitor.GetOrCreate(config)
        self.manager = StorageManager(config, metadata, EventManager())
        self.manager.allocator_backend.get_memory_allocator().buffer.fill_(0)  # faulted in, as pinned memory is
        self.backend: Any = self.manager.storage_backends[backend]
        self.shape = metadata.get_shapes()[0]

    def put(self, numbers: range, content: Any) -> float:
        """Seconds until every chunk can be found."""
        torch = _torch()
        memory = [self.manager.allocate(self.shape, torch.bfloat16, busy_loop=False) for _ in numbers]
        for one, row in zip(memory, content, strict=True):
            one.tensor.view(torch.uint8).view(-1).copy_(row)
        keys = [self.key(number) for number in numbers]
        begin = time.perf_counter()
        self.backend.batched_submit_put_task(keys, memory)
        while any(one.get_ref_count() > 1 for one in memory):
            time.sleep(0.0002)
        took = time.perf_counter() - begin
        for one in memory:
            one.ref_count_down()
        return took

    def get(self, numbers: range, content: Any) -> float:
        """Seconds until every byte is in LMCache's memory."""
        torch = _torch()
        keys = [self.key(number) for number in numbers]
        begin = time.perf_counter()
        memory = self.backend.batched_get_blocking(keys)
        took = time.perf_counter() - begin
        for one, row in zip(memory, content, strict=True):
            if one is None or not torch.equal(one.tensor.view(torch.uint8).view(-1), row):
                raise SystemExit("a chunk did not come back as it was")
            one.ref_count_down()
        return took

    def contains(self, numbers: range) -> float:
        """Seconds to look all chunks up."""
        keys = [self.key(number) for number in numbers]
        begin = time.perf_counter()
        if self.backend.batched_contains(keys) != len(keys):
            raise SystemExit("a chunk that was stored is not found")
        return time.perf_counter() - begin

    def forget(self, numbers: range) -> None:
        """Make room for the next round."""
        for number in numbers:
            self.backend.remove(self.key(number))


def _torch() -> Any:
    import torch  # not at the top: without LMCache this script only says so

    return torch


def content_of(chunks: int, chunk_bytes: int) -> Any:
    """Chunks of normally distributed bfloat16, as models make them."""
    torch = _torch()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(chunks, chunk_bytes // 2, generator=generator).to(torch.bfloat16)
    return values.view(torch.uint8)


def measure(folder: Path, chunk_tokens: int, chunks: int, rounds: int) -> None:
    """One table: GB/s and microseconds, and ratios to LMCache's file connector."""
    peers: dict[str, Peer] = {}
    for number, (name, (backend, settings)) in enumerate(PEERS.items()):
        path = folder / f"{chunk_tokens}-{number}"
        path.mkdir()
        peers[name] = Peer(backend, settings(path), chunk_tokens, chunks)
    content = content_of(chunks, next(iter(peers.values())).chunk_bytes)
    best = {name: [float("inf")] * 3 for name in peers}
    for turn in range(rounds):
        for name, peer in peers.items():
            numbers = range(1 + turn * chunks, 1 + (turn + 1) * chunks)
            took = (peer.put(numbers, content), peer.get(numbers, content), peer.contains(numbers))
            best[name] = [min(pair) for pair in zip(best[name], took, strict=True)]
            peer.forget(numbers)
    nbytes = content.numel()
    base = best["LMCache fs"]
    print(f"\n{chunk_tokens} tokens a chunk, {nbytes / chunks / 2**20:.0f} MiB, {chunks} chunks")
    print(f"{'':16} {'put GB/s':>9} {'x fs':>6} {'get GB/s':>9} {'x fs':>6} {'lookup us':>10}")
    for name, (put, get, has) in best.items():
        line = f"{nbytes / put / 1e9:9.2f} {base[0] / put:6.2f} {nbytes / get / 1e9:9.2f} {base[1] / get:6.2f}"
        print(f"{name:16} {line} {has / chunks * 1e6:10.1f}")
    for peer in peers.values():
        peer.manager.close()


def main() -> None:
    """Measure small and large chunks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where the stores go; a temporary folder if not given")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if importlib.util.find_spec("lmcache") is None:
        print("LMCache is not installed here; `make test-engines ENGINES=lmcache` makes an environment with it")
        return
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    folder = Path(tempfile.mkdtemp(prefix="bench-lmcache-", dir=args.dir))
    try:
        for chunk_tokens, chunks in ((16, 32), (256, 4)):
            measure(folder, chunk_tokens, chunks, args.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

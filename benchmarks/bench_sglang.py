"""SGLang's storage calls over LMDB, against memcpy and against a file per page, in one run.

    python benchmarks/bench_sglang.py [--page-kib 2048] [--pages 64] [--rounds 5] [--path DIR]

``set`` and ``get`` are ``batch_set_v1`` and ``batch_get_v1`` without SGLang around them: pages of a host pool
with the layout ``page_first`` (K and V of a page are two pieces of memory) go in and come back.  ``memcpy``
copies the same pages of the same pool into another one.  ``file`` is SGLang's own file backend through the
generic interface, as its controller drives it, or the same file operations where SGLang is not installed:
no checksum, no flush to the disk.  Every figure is the best of the rounds, which alternate.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvstore_sglang.identity import Model, Place
from kvstore_sglang.page_store import PageRun, PageStore
from kvstore_sglang.pool_store import PageKeys

from kvstore.engines.store_config import load_store_config
from kvstore.plugins import Registry

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
PAGE_TOKENS, HEADS, DIM = 64, 8, 128


class Pool:
    """A host pool as SGLang's ``MHATokenToKVPoolHost`` with the layout ``page_first`` lays it out."""

    layout, dtype, page_size = "page_first", torch.bfloat16, PAGE_TOKENS
    head_num, head_dim, v_head_dim = HEADS, DIM, DIM

    def __init__(self, layers: int, n_pages: int) -> None:
        self.layer_num = layers
        self.kv_buffer = torch.zeros(2, n_pages * PAGE_TOKENS, layers, HEADS, DIM, dtype=torch.bfloat16)

    def halves(self, start: int) -> torch.Tensor:
        return self.kv_buffer[:, start : start + PAGE_TOKENS]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.halves(int(index))
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.kv_buffer[:, :PAGE_TOKENS].numel(), dtype=torch.bfloat16)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.halves(int(index))
        page.copy_(data_page.view(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        parts = [half for start in indices.tolist()[::PAGE_TOKENS] for half in self.halves(start)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


@dataclass
class Rig:
    """A pool full of KV, one to fill, and the keys of its pages."""

    source: Pool
    target: Pool
    names: list[str]

    @classmethod
    def make(cls, page_kib: int, n_pages: int) -> Rig:
        layers = max(1, page_kib * 1024 // (2 * PAGE_TOKENS * HEADS * DIM * 2))
        rig = cls(Pool(layers, n_pages), Pool(layers, n_pages), [f"{i:064x}" for i in range(n_pages)])
        sample = np.concatenate([np.load(f).reshape(-1).view(np.uint8) for f in sorted(DATA.glob("bf16_*.npy"))])
        raw = rig.source.kv_buffer.view(torch.uint8).view(-1)
        raw.copy_(torch.from_numpy(np.resize(sample, raw.numel())))
        return rig

    @property
    def starts(self) -> range:
        return range(0, len(self.names) * PAGE_TOKENS, PAGE_TOKENS)

    @property
    def run(self) -> PageRun:
        return PageRun(PageKeys(self.names), torch.arange(len(self.names) * PAGE_TOKENS))

    @property
    def nbytes(self) -> int:
        return self.source.kv_buffer.nbytes


class PlainFiles:
    """The file operations of SGLang's file backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batch_set(self, keys: list[str], values: list[torch.Tensor]) -> bool:
        for key, value in zip(keys, values, strict=True):
            temporary = self.folder / f".{key}.tmp"
            value.view(torch.uint8).numpy().tofile(temporary)
            temporary.replace(self.folder / f"{key}.bin")
        return True

    def batch_get(self, keys: list[str], targets: list[torch.Tensor]) -> list[torch.Tensor]:
        for key, target in zip(keys, targets, strict=True):
            with (self.folder / f"{key}.bin").open("rb", buffering=0) as f:
                f.readinto(target.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's typing of buffers
        return targets


def file_backend(folder: Path) -> tuple[str, Any]:
    folder.mkdir()
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    except ImportError:
        return "plain files", PlainFiles(folder)
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    kind = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "bench"}
    return "SGLang's file backend", HiCacheFile(HiCacheStorageConfig(**(ranks | kind)), str(folder))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memcpy(rig: Rig) -> None:
    for start in rig.starts:
        rig.target.halves(start).copy_(rig.source.halves(start))


def opened(folder: Path, rig: Rig, codec: str, pool: Pool) -> PageStore:
    registry = Registry.discover()
    tier = {"backend": "lmdb", "path": str(folder), "capacity": 4 * rig.nbytes, "codec": codec}
    config = load_store_config({"l2": [tier | {"queue": 2 * rig.nbytes}]}, registry)
    store = PageStore(config, registry, Place(), Model(name="bench", revision="1"))
    store.add_pool("kv", pool)
    return store


def store_round(folder: Path, rig: Rig, codec: str) -> dict[str, float]:
    store = opened(folder, rig, codec, rig.source)

    def save() -> None:
        if not all(store.save("kv", rig.run)):
            raise SystemExit("pages were refused")

    times = {f"set ({codec})": timed(save)}
    times[f"set until stored ({codec})"] = times[f"set ({codec})"] + timed(store.flush)
    store.close()
    reader = opened(folder, rig, codec, rig.target)

    def load() -> None:
        if not all(reader.load("kv", rig.run)):
            raise SystemExit("pages are missing")

    rig.target.kv_buffer.zero_()
    times[f"get, verified ({codec})"] = min(timed(load) for _ in range(3))
    if not torch.equal(rig.target.kv_buffer.view(torch.int16), rig.source.kv_buffer.view(torch.int16)):
        raise SystemExit("other bytes came back")
    times["batch_exists"] = min(timed(lambda: reader.count("kv", rig.run.keys)) for _ in range(5))
    reader.close()
    shutil.rmtree(folder)
    return times


def file_round(folder: Path, rig: Rig, state: SimpleNamespace) -> dict[str, float]:
    state.name, backend = file_backend(folder)

    def save() -> None:
        backend.batch_set(rig.names, [rig.source.get_data_page(start) for start in rig.starts])

    def load() -> None:
        pages = backend.batch_get(rig.names, [rig.target.get_dummy_flat_data_page() for _ in rig.names])
        for start, page in zip(rig.starts, pages, strict=True):
            rig.target.set_from_flat_data_page(start, page)

    times = {"file set": timed(save), "file get": min(timed(load) for _ in range(3))}
    shutil.rmtree(folder)
    return times


def report(rig: Rig, best: dict[str, float], file_name: str) -> None:
    exists = best.pop("batch_exists")
    print(f"{'':34}{'pages/s':>10}{'GB/s':>9}{'/ memcpy':>11}{'/ file':>9}")
    for name, took in best.items():
        file = best["file set" if "set" in name else "file get"]
        against = f"{file / took:9.2f}" if name != "memcpy" else ""
        speed = f"{len(rig.names) / took:10.0f}{rig.nbytes / 1e9 / took:9.2f}{best['memcpy'] / took:11.2f}"
        print(f"{name:34}{speed}{against}")
    print(f"batch_exists of {len(rig.names)} pages: {exists * 1e6:.0f} us; file is {file_name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, default=2048, help="page size in KiB, a multiple of 256 (2048)")
    parser.add_argument("--pages", type=int, default=64, help="pages per call, SGLang's most is 128 (64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--path", help="where stores are made, on a real disk; default: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    rig, state, rounds = Rig.make(args.page_kib, args.pages), SimpleNamespace(name=""), []
    with tempfile.TemporaryDirectory(dir=args.path, prefix="bench-sglang-") as name:
        for _ in range(args.rounds):
            times = {"memcpy": min(timed(lambda: memcpy(rig)) for _ in range(3))}
            for codec in ("none", "planes"):
                times |= store_round(Path(name) / "store", rig, codec)
            rounds.append(times | file_round(Path(name) / "files", rig, state))
    print(f"{args.pages} pages of {rig.nbytes // args.pages // 1024} KiB, {PAGE_TOKENS} tokens each")
    report(rig, {name: min(times[name] for times in rounds) for name in rounds[0]}, state.name)


if __name__ == "__main__":
    main()

"""One config file with L1, LMDB, NVMe and S3: every tier serves, and the loss of one hurts no other."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.l1.cache import L1Cache
from kvstore.l2.part import Part
from kvstore.opening import OpenTier
from tests.support import blocks_of, key_of, same_bytes
from tests.support_s3 import CREDENTIALS, free_ports, make_bucket, wait_until_answering

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
BLOCKS = 20
TIERS = ("lmdb", "nvme", "s3")
BUCKET = "four-tiers"
ROOT = Path(__file__).parents[2]

CONFIG = """
[l1]
capacity = "16MiB"

[[l2]]
backend = "lmdb"
path = "{folder}/lmdb"
capacity = "64MiB"

[[l2]]
backend = "nvme"
path = "{folder}/nvme"
capacity = "64MiB"
admit = "all"

[[l2]]
backend = "s3"
bucket = "{bucket}"
endpoint_url = "{url}"
access_key_id = "{access_key_id}"
secret_access_key = "{secret_access_key}"
admit = "all"
"""


class S3Process:
    """moto's server in a process of its own, on one port for life; what it holds dies with it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until_answering(self.url, self._process, self._log)
        make_bucket(self.url, BUCKET)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Process]:
    with S3Process(tmp_path) as server:
        yield server


@pytest.fixture
def config(tmp_path: Path, s3: S3Process) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(CONFIG.format(folder=tmp_path, bucket=BUCKET, url=s3.url, **CREDENTIALS))
    return path


class Opened:
    """An open cache over the config file, and a way to look behind it."""

    def __init__(self, config: Path) -> None:
        self.cache = KVCache.open(config, spec=SPEC, namespace=Namespace(model="test/model", revision="r1"))
        assert self.cache._state is not None
        assert self.cache._state.stack.l1 is not None
        self.l1: L1Cache = self.cache._state.stack.l1
        self.tiers: dict[str, OpenTier] = {t.tier.name: t for t in self.cache._state.stack.tiers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def put(self, seed: int) -> KVCacheKey:
        key = key_of("tokens", BLOCKS, seed=seed)
        assert self.cache.put(key, blocks_of(SPEC, BLOCKS, seed=seed)) == BLOCKS
        return key

    def read(self, seed: int) -> int:
        """Get a prompt; every delivered block has the right bytes."""
        blocks = blocks_of(SPEC, BLOCKS, seed=seed)
        out = torch.full_like(blocks, 7.0)
        n = self.cache.get(key_of("tokens", BLOCKS, seed=seed), out)
        assert same_bytes(out[:n], blocks[:n])
        return n

    def drop(self, key: KVCacheKey, *tiers: str) -> None:
        """Delete blocks from L1 and some tiers, behind the cache's back."""
        self.l1.delete(key.digests)
        for tier in tiers:
            assert self.tiers[tier].tier.delete(Part.rest(key)) in {0, BLOCKS}

    def counters(self) -> dict[str, Any]:
        return {t.name: t.counters for t in self.cache.stats().tiers}

    def held(self, key: KVCacheKey) -> dict[str, int]:
        return {name: t.tier.leading(key) for name, t in self.tiers.items()}


def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_each_tier_serves_in_turn(config: Path) -> None:
    with Opened(config) as opened:
        key = opened.put(0)
        assert opened.cache.lookup(key).by_tier["l1"] == BLOCKS
        assert opened.read(0) == BLOCKS
        opened.cache.flush(20)
        assert opened.held(key) == dict.fromkeys(TIERS, BLOCKS)
        assert opened.cache.stats().cache.l1_hits == BLOCKS
        assert all(c.lookups == 0 for c in opened.counters().values())

    with Opened(config) as opened:  # a new L1
        above: list[str] = []
        for name in TIERS:
            opened.drop(key, *above)
            before = opened.counters()
            assert opened.read(0) == BLOCKS
            after = opened.counters()
            gained = {n: (after[n].hits - before[n].hits, after[n].misses - before[n].misses) for n in TIERS}
            expected = dict.fromkeys(TIERS, (0, 0)) | dict.fromkeys(above, (0, BLOCKS)) | {name: (BLOCKS, 0)}
            assert gained == expected
            opened.cache.flush(20)
            assert opened.held(key) == dict.fromkeys(TIERS, BLOCKS)  # it moved up again
            above.append(name)
        counters = opened.counters()
        assert all(c.lookups == c.hits + c.misses for c in counters.values())
        assert all(c.io_errors + c.timeouts + c.corrupt == 0 for c in counters.values())
        cache = opened.cache.stats().cache
        assert (cache.lookups, cache.hits, cache.misses) == (3 * BLOCKS, 3 * BLOCKS, 0)
        assert counters["s3"].stored == 0  # never written back to where it came from


_OTHER_PROCESS = """
import json, sys
sys.path.insert(0, {root!r})
from tests.stateful.test_four_tiers import Opened, BLOCKS
from pathlib import Path
with Opened(Path({config!r})) as opened:
    n = opened.read(0)
    print(json.dumps([n, {{name: c.hits for name, c in opened.counters().items()}}]))
"""


def test_another_process_is_served_by_the_same_tiers(config: Path) -> None:
    with Opened(config) as opened:
        key = opened.put(0)
        opened.cache.flush(20)
        opened.drop(key, "lmdb", "nvme")
        code = _OTHER_PROCESS.format(root=str(ROOT), config=str(config))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [BLOCKS, {"lmdb": 0, "nvme": 0, "s3": BLOCKS}]
        assert opened.held(key) == dict.fromkeys(TIERS, BLOCKS)  # the other process moved it up


def test_a_damaged_nvme_copy_is_repaired_from_s3(config: Path) -> None:
    with Opened(config) as opened:
        key = opened.put(0)
        opened.cache.flush(20)
    folder = config.parent / "nvme"
    with Opened(config) as opened:
        opened.drop(key, "lmdb")
        damage(folder, blocks_of(SPEC, BLOCKS)[7])
        assert opened.read(0) == BLOCKS
        opened.cache.flush(20)
        counters = opened.counters()["nvme"]
        assert (counters.corrupt, counters.repaired) == (1, 1)
        opened.drop(key, "lmdb", "s3")
        assert opened.read(0) == BLOCKS


def damage(folder: Path, block: torch.Tensor) -> None:
    """Change a byte of a block where it lies on the disk; incompressible blocks are stored as they are."""
    needle = block.reshape(-1).view(torch.uint8)[1000:1064].numpy().tobytes()
    for path in folder.rglob("*"):
        at = path.read_bytes().find(needle) if path.is_file() else -1
        if at >= 0:
            with path.open("r+b", buffering=0) as file:
                file.seek(at)
                file.write(bytes([needle[0] ^ 1]))
            return
    pytest.fail("the block is nowhere on the disk")


class Load:
    """Threads that read what L1 and NVMe hold, again and again, and note how long each read took."""

    def __init__(self, opened: Opened, in_l1: int, on_nvme: int) -> None:
        self._opened = opened
        self._stop = threading.Event()
        self.took_s: dict[str, list[float]] = {"l1": [], "nvme": []}
        self.wrong: list[str] = []
        nvme_key = key_of("tokens", BLOCKS, seed=on_nvme)
        self._threads = [
            threading.Thread(target=self._run, args=("l1", in_l1, None)),
            threading.Thread(target=self._run, args=("nvme", on_nvme, nvme_key)),
        ]

    def _run(self, name: str, seed: int, drop: KVCacheKey | None) -> None:
        while not self._stop.is_set():
            if drop is not None:
                self._opened.drop(drop, "lmdb")
            started = time.monotonic()
            try:
                n = self._opened.read(seed)
            except Exception as e:  # noqa: BLE001 - the main thread reports it
                self.wrong.append(f"{name}: {e!r}")
                return
            self.took_s[name].append(time.monotonic() - started)
            if n != BLOCKS:
                self.wrong.append(f"{name}: {n} blocks")
            self._stop.wait(0.01)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)


def test_the_loss_of_s3_under_load_hurts_nobody_else_and_ends_by_itself(config: Path, s3: S3Process) -> None:
    with Opened(config) as opened:
        keys = [opened.put(seed) for seed in range(3)]
        opened.cache.flush(20)
        opened.drop(keys[2], "lmdb", "nvme")  # only S3 has it
        assert opened.read(0) == BLOCKS
        with Load(opened, in_l1=0, on_nvme=1) as load:
            assert until(lambda: min(map(len, load.took_s.values())) >= 5)
            s3.kill()
            assert until(lambda: opened.read(2) == 0 and opened.cache.health().tiers["s3"].state == "down")
            health = opened.cache.health()
            assert health.state == "degraded"
            assert (health.tiers["lmdb"].state, health.tiers["nvme"].state) == ("ok", "ok")
            before = {name: len(took) for name, took in load.took_s.items()}
            suspended_s = [timed(lambda: opened.read(2)) for _ in range(10)]
            assert sorted(suspended_s)[5] < 0.5  # a miss, and at once
            assert until(lambda: all(len(load.took_s[name]) >= before[name] + 10 for name in before))
            assert opened.counters()["s3"].rejected_by_breaker > 0

            s3.start()
            seeds = iter(range(10, 200))
            assert until(lambda: stored_and_read_back(opened, next(seeds)), 40)
            assert until(lambda: opened.read(2) == 0 and opened.cache.health().state == "ok")

        opened.cache.flush(20)
        assert load.wrong == []
        for name, took in load.took_s.items():
            assert max(took) < 1.5, name  # far from S3's deadline of 2 s, on a machine that does other work
        counters = opened.counters()
        assert all(c.lookups == c.hits + c.misses for c in counters.values())
        assert all(counters[name].io_errors + counters[name].timeouts == 0 for name in ("lmdb", "nvme"))
        assert opened.l1.counters.pinned_blocks == 0


def timed(fn: Callable[[], object]) -> float:
    started = time.monotonic()
    fn()
    return time.monotonic() - started


def stored_and_read_back(opened: Opened, seed: int) -> bool:
    """Whether a new prompt reaches S3 and comes back from there."""
    key = opened.put(seed)
    opened.cache.flush(20)
    opened.drop(key, "lmdb", "nvme")
    hits = opened.counters()["s3"].hits
    return opened.read(seed) == BLOCKS and opened.counters()["s3"].hits == hits + BLOCKS

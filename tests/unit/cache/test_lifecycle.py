"""Restart, crash, fork, exit and sharing, over a real LMDB store in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, ClosedError, KVCache, Namespace
from tests.support import MakeKey, OpenCache, blocks_of, same_bytes

PRELUDE = """
import os, sys, json, time
import torch
from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from tests.support import blocks_of, key_of, same_bytes
spec = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
config = json.loads(sys.argv[1])
def open_cache():
    return KVCache.open(config, spec=spec, namespace=Namespace(model="test/model", revision="r1"))
"""


def start(code: str, config: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    script = PRELUDE + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | env,
    )


def run(code: str, config: dict[str, Any], **env: str) -> str:
    process = start(code, config, **env)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return out


def test_every_flushed_block_survives_kill_9(lmdb_config: dict[str, Any], key_kind: str) -> None:
    writer = start(
        f"""
        cache = open_cache()
        for seed in range(40):
            cache.put(key_of({key_kind!r}, 25, seed=seed), blocks_of(spec, 25, seed=seed))
            cache.flush()
        print("flushed", flush=True)
        seed = 40
        while True:
            cache.put(key_of({key_kind!r}, 25, seed=seed), blocks_of(spec, 25, seed=seed))
            seed += 1
        """,
        lmdb_config,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    assert writer.stdout.readline() == "flushed\n", writer.stderr.read()
    writer.send_signal(signal.SIGKILL)
    writer.communicate()

    told = run(
        f"""
        cache = open_cache()
        good = 0
        for seed in range(40):
            blocks = blocks_of(spec, 25, seed=seed)
            out = torch.zeros_like(blocks)
            got = cache.get(key_of({key_kind!r}, 25, seed=seed), out)
            assert same_bytes(out[:got], blocks[:got])
            good += got
        print(good)
        cache.put(key_of({key_kind!r}, 25, seed=99), blocks_of(spec, 25, seed=99))
        cache.flush()
        print(cache.lookup(key_of({key_kind!r}, 25, seed=99)).by_tier["l1"])
        """,
        lmdb_config,
        PYTHONHASHSEED="1",
    )

    assert told.split() == ["1000", "25"]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_are_the_same_in_every_process(
    lmdb_config: dict[str, Any], open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey, key_kind: str, seed: str
) -> None:
    with open_cache() as cache:
        cache.put(make_key(10), blocks_of(spec, 10))

    told = run(
        f"""
        blocks = blocks_of(spec, 10)
        out = torch.zeros_like(blocks)
        with open_cache() as cache:
            print(cache.get(key_of({key_kind!r}, 10), out), same_bytes(out, blocks))
        """,
        lmdb_config,
        PYTHONHASHSEED=seed,
    )

    assert told == "10 True\n"


def test_a_script_without_close_exits_in_time_and_loses_nothing_it_had_time_for(lmdb_config: dict[str, Any]) -> None:
    lmdb_config["l2"][0]["queue"] = "4MiB"  # for all 100 blocks: a slow disk must not make a put be refused
    started = time.monotonic()
    run(
        """
        cache = open_cache()
        for seed in range(4):
            cache.put(key_of("tokens", 25, seed=seed), blocks_of(spec, 25, seed=seed))
        """,
        lmdb_config,
    )
    took = time.monotonic() - started
    told = run('print(open_cache().lookup(key_of("tokens", 25, seed=3)).blocks)', lmdb_config)

    assert told == "25\n"
    assert took < 30  # the interpreter and torch take most of it; close itself is bounded by 5 s


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise KeyboardInterrupt", "os.kill(os.getpid(), 15)"])
def test_other_ends_leave_a_sound_store(lmdb_config: dict[str, Any], end: str) -> None:
    process = start(
        f"""
        cache = open_cache()
        cache.put(key_of("tokens", 25), blocks_of(spec, 25))
        cache.flush()
        cache.put(key_of("tokens", 25, seed=1), blocks_of(spec, 25, seed=1))
        {end}
        """,
        lmdb_config,
    )
    process.communicate(timeout=60)
    told = run('print(open_cache().lookup(key_of("tokens", 25)).blocks)', lmdb_config)

    assert told == "25\n"


def test_a_forked_child_starts_cold_and_hurts_nobody(lmdb_config: dict[str, Any]) -> None:
    told = run(
        """
        import threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        cache = open_cache()
        key, blocks = key_of("tokens", 20), blocks_of(spec, 20)
        cache.put(key, blocks)
        cache.flush()
        lease = cache.acquire(key)
        stop = threading.Event()
        def busy(seed):
            out = torch.zeros_like(blocks)
            while not stop.is_set():
                cache.put(key_of("tokens", 20, seed=seed), blocks)
                assert cache.get(key, out) == 20
        threads = [threading.Thread(target=busy, args=(s,)) for s in range(1, 5)]
        for t in threads: t.start()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                try:
                    out = torch.zeros_like(blocks)
                    found = cache.lookup(key).by_tier
                    assert found["l1"] == 0 and found["lmdb"] == 20, found
                    assert cache.get(key, out) == 20 and same_bytes(out, blocks)
                    cache.put(key_of("tokens", 5, seed=77), blocks[:5])
                    cache.close()
                    os._exit(0)
                except BaseException as e:
                    print("child:", repr(e), flush=True)
                    os._exit(1)
            started = time.monotonic()
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                assert time.monotonic() - started < 20, "the child hangs"
                time.sleep(0.02)
        stop.set()
        for t in threads: t.join()
        out = torch.zeros_like(blocks)
        assert cache.get(key, out) == 20 and same_bytes(out, blocks)
        assert all(same_bytes(a, b) for a, b in zip(lease.tensors, blocks))
        print(cache.lookup(key_of("tokens", 5, seed=77)).blocks)
        """,
        lmdb_config,
    )

    assert told == "5\n"


def test_what_one_process_puts_another_one_hits_at_once(
    lmdb_config: dict[str, Any], open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey, key_kind: str
) -> None:
    cache = open_cache()
    other = start(
        f"""
        cache = open_cache()
        cache.put(key_of({key_kind!r}, 10), blocks_of(spec, 10))
        cache.flush()
        print("stored", flush=True)
        time.sleep(60)
        """,
        lmdb_config,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "stored\n"
        key, blocks = make_key(10), blocks_of(spec, 10)
        out = torch.zeros_like(blocks)
        assert cache.get(key, out) == 10
        assert same_bytes(out, blocks)
    finally:
        other.kill()
        other.communicate()


def test_a_clear_in_another_cache_reaches_this_one_at_its_next_tier_access(
    open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey
) -> None:
    mine, theirs = open_cache(), open_cache()
    key, blocks = make_key(5), blocks_of(spec, 5)
    mine.put(key, blocks)
    mine.flush(10)
    assert mine.lookup(key).by_tier["l1"] == 5

    theirs.clear()
    mine.lookup(make_key(1, seed=5))  # a miss in L1 asks the tier

    assert mine.lookup(key).blocks == 0
    assert theirs.lookup(key).blocks == 0


def test_open_and_close_leave_nothing_behind(
    lmdb_config: dict[str, Any], spec: BlockSpec, namespace: Namespace, make_key: MakeKey
) -> None:
    key, blocks = make_key(4), blocks_of(spec, 4)

    def cycle() -> None:
        with KVCache.open(lmdb_config, spec=spec, namespace=namespace) as cache:
            cache.put(key, blocks)
            cache.flush(10)
            assert cache.get(key, torch.zeros_like(blocks)) == 4

    for _ in range(5):
        cycle()
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(30):
        cycle()

    assert len(os.listdir("/proc/self/fd")) <= fds
    assert threading.active_count() <= threads


def test_calls_during_close_end_cleanly(open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey) -> None:
    cache = open_cache()
    key, blocks = make_key(10), blocks_of(spec, 10)
    cache.put(key, blocks)
    wrong: list[BaseException] = []

    def use() -> None:
        out = torch.zeros_like(blocks)
        try:
            while True:
                got = cache.get(key, out)
                assert same_bytes(out[:got], blocks[:got])
        except ClosedError:
            pass
        except BaseException as e:  # noqa: BLE001 - reported by the main thread
            wrong.append(e)

    users = [threading.Thread(target=use) for _ in range(8)]
    for user in users:
        user.start()
    cache.close()
    for user in users:
        user.join(20)

    assert not any(user.is_alive() for user in users)
    assert wrong == []


def test_a_lease_outlives_the_cache(open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(3), blocks_of(spec, 3)
    cache = open_cache()
    cache.put(key, blocks)
    lease = cache.acquire(key)
    tensors = lease.tensors

    cache.close()

    assert all(same_bytes(t, b) for t, b in zip(tensors, blocks, strict=True))
    lease.release()

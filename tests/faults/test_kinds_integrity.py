"""Kinds of trouble with bytes: damage that moves up, other processes' dtypes, slow reads, buffers in use."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, KVCache, Namespace
from tests import doubles
from tests.faults.process import Forge, Shim
from tests.faults.store import TIER, Store, over
from tests.support_faults import NAMESPACE, SMALL, WatchedCache, chain, noise, same, target, unrelated, untouched

N = 4
KEY = chain(N, seed=13)
BLOCKS = noise(SMALL, range(N))


@pytest.mark.parametrize("read", ["acquire", "prefetch", "stream", "get"])
@over("LNTS")
def test_a_damaged_record_is_never_promoted(store: Store, read: str) -> None:
    with store.open(**store.alone()) as cache:
        cache.store(KEY, BLOCKS)
        place = store.at(KEY, 1)
        value = store.read(place)
        store.write(place, value[:-1] + bytes([value[-1] ^ 1]))
    with store.open(l1="1MiB", **store.alone()) as cache:
        for _ in range(2):  # a second read is what promotes
            assert delivered(cache, read) == 1
        assert cache.lookup(KEY).by_tier["l1"] <= 1
        assert cache.contains_each(KEY[1:2])[0].value != "present"
        out = target(SMALL)
        assert cache.get_each(KEY[1:2], out)[0] is not BlockStatus.DELIVERED
        assert untouched(out)
        counters = cache.tier(TIER).counters
        assert counters.corrupt >= 1
        assert cache.stats().l1.pinned_blocks == 0


def delivered(cache: WatchedCache, read: str) -> int:
    """Leading blocks that a read gives, all of them exact."""
    if read == "prefetch":
        return int(cache.prefetch(KEY).result(10))
    if read == "acquire":
        with cache.acquire(KEY) as lease:
            assert all(same(got, block) for got, block in zip(lease.tensors, BLOCKS, strict=False))
            return len(lease)
    if read == "stream":
        groups = list(cache.stream(KEY))
        return groups[-1].n_blocks if groups else 0
    out = target(SMALL, N)
    n = int(cache.get(KEY, out))
    assert same(out[:n], BLOCKS[:n])
    return n


DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
CODECS = ["none", "zstd", "planes", "planes-base"]
FORMS = [*itertools.product(DTYPES, CODECS)]
WRITE = """
from tests.faults.test_kinds_integrity import form, forms_for
for n, (dtype, codec) in enumerate(forms_for(STORE)):
    spec, namespace = form(dtype, codec)
    with STORE.open(spec=spec, codec=codec, namespace=namespace) as cache:
        cache.put(chain(2, seed=n, spec=spec), noise(spec, [n, n + 1]))
        cache.flush(60)
print("null")
"""


def form(dtype: str, codec: str) -> tuple[BlockSpec, Namespace]:
    """A spec, and a namespace of its own for the codec."""
    spec = BlockSpec(layers=2, kv_heads=2, head_dim=32, block_tokens=16, dtype=dtype)
    return spec, dataclasses.replace(NAMESPACE, revision=codec)


def forms_for(store: Store) -> list[tuple[str, str]]:
    """All of them, or every fifth where opening takes long: each dtype and each codec at least once."""
    return FORMS[:: 5 if store.kind == "s3" else 1]


@over("LNTS")
def test_what_another_process_stored_in_any_form_is_read_with_another_codec_set(store: Store, forge: Forge) -> None:
    forge.work(WRITE, store)
    for n, (dtype, codec) in enumerate(forms_for(store)):
        spec, namespace = form(dtype, codec)
        others = [other for other in CODECS if other != codec]
        with store.open(spec=spec, codec=others[n % 3], namespace=namespace) as cache:  # what matters is in the record
            out = target(spec, 2)
            assert cache.get(chain(2, seed=n, spec=spec), out) == 2, (dtype, codec)
            assert same(out, noise(spec, [n, n + 1])), (dtype, codec)


SLOW_READS = """
shim = FaultSwitch(Path(ARGS[0]))
N, wrong, hits, over = 400 if STORE.kind == "nvme" else 250, [], [0], threading.Event()
with STORE.open(capacity="8MiB" if STORE.kind != "nvme" else "16MiB", deadline=20.0) as cache:
    newest = [0]
    def read(seed):
        import random
        rng = random.Random(seed)
        while not over.is_set():
            first = max(0, newest[0] - rng.randrange(1, 250))
            key = unrelated(first)
            out = target(SMALL)
            single = seed % 2
            got = cache.get(key, out) if single else sum(s.value == "delivered" for s in cache.get_each(key, out))
            if got and not same(out, noise(SMALL, [first])):
                wrong.append(first)
            hits[0] += got
    for i in range(100):
        cache.put(unrelated(i), noise(SMALL, [i]))
    cache.flush(60)
    newest[0] = 100
    shim.set(Fault.SLOW, delay_ms=1)
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for i in range(100, 100 + N):
        cache.put(unrelated(i), noise(SMALL, [i]))
        newest[0] = i
        if i % 25 == 24:
            cache.flush(60)
    over.set()
    for thread in threads:
        thread.join(60)
    shim.off()
    counters = cache.tier(TIER).counters
print(json.dumps(dict(wrong=wrong, hits=hits[0], evicted=counters.evicted, corrupt=counters.corrupt,
                      mismatch=counters.key_mismatch, slowed=shim.injected)))
"""


@over("LNT")
def test_slow_reads_under_eviction_give_the_block_or_a_miss(store: Store, forge: Forge, shim: Shim) -> None:
    report = forge.work(SLOW_READS, store, shim.control, shim=shim)
    assert report["wrong"] == []
    assert report["hits"] > 0, report
    assert report["evicted"] > 0, report
    assert report["slowed"] > 0, report
    assert report["corrupt"] == report["mismatch"] == 0, report  # an eviction is no damage


@pytest.mark.parametrize("l1", [None, "16MiB"])
@over("L")
def test_a_buffer_that_changes_during_the_put_makes_no_damaged_record(store: Store, l1: str | None) -> None:
    """What is stored is some mixture then, as the caller wished, but a sound record of it."""
    memory = bytearray(64 * SMALL.nbytes)
    mine = torch.frombuffer(memory, dtype=torch.uint8).view(SMALL.torch_dtype()).view(64, *SMALL.shape)
    over_ = threading.Event()

    def scribble() -> None:
        raw = mine.view(torch.uint8)
        for value in itertools.cycle(range(256)):
            raw.fill_(value)
            if over_.is_set():
                return

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        with store.open(l1=l1, codec="planes", queue="16MiB") as cache:
            for seed in range(4):
                assert cache.put(chain(64, seed=seed), mine) == 64
            cache.flush(60)
            over_.set()
            if l1 is not None:
                cache._state.stack.l1.clear()
            for seed in range(4):
                out = target(SMALL, 64)
                assert cache.get(chain(64, seed=seed), out) == 64
            assert cache.tier(TIER).counters.corrupt == 0
    finally:
        over_.set()
        thread.join()


class Slow(doubles.PooledBackend):
    """Each read takes longer than the cache waits."""

    delay_s = 0.0

    def get_many(self, *args: object) -> object:  # type: ignore[override]
        time.sleep(self.delay_s)
        return super().get_many(*args)  # type: ignore[arg-type]


def test_reads_that_are_given_up_never_touch_the_callers_buffer_later() -> None:
    backend = Slow()
    registry, name = doubles.register(lambda: backend)
    config = {
        "l1": {"capacity": 16 * (SMALL.nbytes + 4096)},
        "l2": [{"backend": name, "deadline": "10ms", "workers": 4}],
    }
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE, registry=registry) as cache:
        for i in range(40):
            cache.put(unrelated(i), noise(SMALL, [i]))
            cache.flush(10)
        backend.delay_s = 0.05
        out = target(SMALL)
        given_up = 0
        for round_ in range(200):
            i = round_ % 40
            out.view(torch.uint8).fill_(round_ % 251)
            if cache.get(unrelated(i), out):
                assert same(out, noise(SMALL, [i])), round_
                continue
            given_up += 1
            assert bool((out.view(torch.uint8) == round_ % 251).all()), round_
        assert given_up > 20
        marked = out.clone()
        time.sleep(3 * backend.delay_s)  # whatever is still under way comes to its end
        assert same(out, marked)
        backend.delay_s = 0.0
        counters = cache.stats().tiers[0].counters
        assert counters.timeouts > 0
        assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]

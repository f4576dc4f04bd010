"""A25: forks, ends of every kind, reopening, closing under load, and few file descriptors."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvstore.errors import ClosedError
from tests.faults.conftest import Rounds
from tests.faults.media import server_of
from tests.faults.process import Forge, Worker
from tests.faults.s3_faults import Fault
from tests.faults.store import MIB, TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, chain, noise, same, target, unrelated

# -- fork

FORK = """
N, OPS = 200, int(ARGS[0])
cache = STORE.open(l1="1MiB")
for i in range(N):
    cache.put(unrelated(i), noise(SMALL, [i]))
    if i % 4 == 3:  # the queue is as small as L1
        cache.flush(60)
errors, over = [], threading.Event()
def check(i):
    found = cache.fetch(unrelated(i))
    assert found is None or same(found, noise(SMALL, [i])), f"wrong bytes for {i}"
    return found is not None
def busy(seed):
    import random
    rng = random.Random(seed)
    try:
        while not over.is_set():
            i = rng.randrange(N)
            check(i)
            if rng.random() < 0.2:
                cache.put(unrelated(1000 + i), noise(SMALL, [1000 + i]))
    except BaseException as e:
        errors.append(repr(e))
check(0)  # torch fills tables at the first use of an operation: a fork in the middle leaves the child waiting for them
threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
children = []
for n in range(3):
    time.sleep(0.02)
    pid = os.fork()
    if not pid:
        code = 3
        try:
            began = time.monotonic()
            there = sum(check((7 * k + n) % N) for k in range(OPS))
            for i in range(20):
                cache.put(unrelated(5000 + 100 * n + i), noise(SMALL, [5000 + 100 * n + i]))
                cache.flush(30)
            for i in range(20):
                assert check(5000 + 100 * n + i)
            assert there > OPS * 0.9, there
            assert cache.stats().cache.lookups == OPS + 20
            if n:  # the first one ends without a close
                cache.cache.close()
            code = 0
        except BaseException as e:
            print(json.dumps(repr(e)), flush=True)
        finally:
            os._exit(code)
    children.append((pid, time.monotonic()))
took = []
for pid, began in children:
    _, status = os.waitpid(pid, 0)
    took.append(time.monotonic() - began)
    assert status == 0, (status, took)
over.set()
for thread in threads:
    thread.join(30)
assert not errors, errors
missing = [i for i in range(N) if not check(i)]
theirs = sum(check(5000 + 100 * n + i) for n in range(3) for i in range(20))
cache.close()
print(json.dumps(dict(missing=missing, theirs=theirs, took=took)))
"""


@over("LNTS")
def test_a_child_forked_under_load_works_and_disturbs_nobody(store: Store, forge: Forge, rounds: Rounds) -> None:
    report = forge.work(FORK, store, rounds(60, 200))
    assert report["missing"] == []
    assert report["theirs"] == 60
    assert max(report["took"]) < 20  # of a busy machine; alone it takes under a second


# -- ends

PENDING = """
import atexit, _thread
cache = STORE.open(l1="8MiB", queue="8MiB").cache
cache.put(unrelated(1000), noise(SMALL, [1000]))
cache.flush(30)
for i in range(100):
    cache.put(unrelated(i), noise(SMALL, [i]))
print("put", flush=True)
"""
ENDS_S = 8.0  # 5 s, on a busy machine
ENDS = {
    "falls off its end": ("", 0, False),
    "falls off its end, and nobody holds the cache": ("del cache; import gc; gc.collect()", 0, False),
    "sys.exit": ("sys.exit(0)", 0, False),
    "sys.exit in a thread": ("t = threading.Thread(target=sys.exit); t.start(); t.join()", 0, False),
    "an exception": ("raise ZeroDivisionError('the script itself')", 1, True),
    "KeyboardInterrupt in a put": (
        "threading.Timer(0.05, _thread.interrupt_main).start()\nwhile True: cache.put(unrelated(0), noise(SMALL, [0]))",
        -signal.SIGINT,
        True,
    ),
    "SIGTERM": ("os.kill(os.getpid(), 15); time.sleep(30)", -signal.SIGTERM, False),
}


@over("LNTS")
def test_a_process_ends_in_time_whatever_ends_it(store: Store, forge: Forge) -> None:
    for how, (end, code, complains) in ENDS.items():
        with forge.start(PENDING + end, store, ends=True) as worker:
            assert worker.line() == "put", how
            began = time.monotonic()
            assert list(worker.lines()) == [], how
            assert time.monotonic() - began < ENDS_S, how
            judge_end(worker, how, code, complains=complains)
        with store.open() as cache:
            found = {i: cache.fetch(unrelated(i)) for i in [*range(100), 1000]}
            wrong = [i for i, block in found.items() if block is not None and not same(block, noise(SMALL, [i]))]
            lost = [i for i, block in found.items() if block is None]
            assert wrong == [], how
            assert 1000 not in lost, how  # it was flushed
            assert lost == [] or code, how  # a good end writes out what was accepted
            cache.delete(unrelated(0))
            cache.store(unrelated(0), noise(SMALL, [0]))
            assert cache.fetch(unrelated(0)) is not None, how
            cache.clear()
    assert store.strangers() == []


def judge_end(worker: Worker, how: str, code: int, *, complains: bool) -> None:
    assert worker.exit_code == code, (how, worker.exit_code, worker.errors[-2000:])
    tracebacks = worker.errors.count("Traceback")
    assert tracebacks == int(complains), (how, worker.errors[-2000:])
    assert "Exception ignored" not in worker.errors, (how, worker.errors[-2000:])


HUNG = """
from tests.faults.s3_faults import Fault
cache = STORE.open(l1="8MiB", queue="8MiB").cache
for i in range(100):
    cache.put(unrelated(i), noise(SMALL, [i]))
print("put", flush=True)
"""


@over("S")
def test_a_process_ends_in_time_while_the_server_hangs(store: Store, forge: Forge) -> None:
    with forge.start(HUNG, store, ends=True) as worker:
        assert worker.line() == "put"
        server_of(store).inject(Fault("hang"))
        began = time.monotonic()
        assert list(worker.lines()) == []
        assert time.monotonic() - began < ENDS_S
        judge_end(worker, "hang", 0, complains=False)


# -- open and close

CYCLES = """
def held():
    import gc
    gc.collect()
    shm = sorted(p.name for p in Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else []
    return threading.active_count(), len(os.listdir("/proc/self/fd")), shm
first, sizes = None, []
for n in range(int(ARGS[0])):
    with STORE.open(l1="1MiB") as cache:
        cache.put(unrelated(n % 8), noise(SMALL, [n % 8]))
        cache.flush(30)
        assert same(cache.fetch(unrelated(n % 8)), noise(SMALL, [n % 8]))
    sizes.append(rss_bytes())
    if n == 5:
        first = held()
deadline = time.monotonic() + 5
while held() != first and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps(dict(first=first, last=held(), early=max(sizes[:10]), late=max(sizes[-5:]))))
"""


@over("LNTS")
def test_opening_and_closing_again_and_again_keeps_nothing(store: Store, forge: Forge, rounds: Rounds) -> None:
    report = forge.work(CYCLES, store, rounds(25, 200))
    assert report["last"][:2] == report["first"][:2], report
    assert not set(report["last"][2]) - set(report["first"][2]), report
    assert report["late"] <= report["early"] * 1.05 + 2 * MIB, report


@over("LNTS")
def test_a_closed_cache_says_so_and_closing_again_is_fine(store: Store) -> None:
    key, block = unrelated(0), noise(SMALL, [0])
    cache = store.open(l1="1MiB")
    cache.store(key, block)
    cache.close()
    inner = cache.cache
    inner.close()
    inner.close()
    for call in (
        lambda: inner.get(key, target(SMALL)),
        lambda: inner.get_each(key, target(SMALL)),
        lambda: inner.put(key, block),
        lambda: inner.lookup(key),
        lambda: inner.contains_each(key),
        lambda: inner.acquire(key),
        lambda: inner.allocate(key),
        lambda: inner.prefetch(key),
        lambda: list(inner.stream(key)),
        lambda: inner.delete(key),
        inner.clear,
        inner.flush,
        inner.stats,
        inner.health,
    ):
        with pytest.raises(ClosedError):
            call()


class Users:
    """Threads that use a cache until it says that it is closed."""

    def __init__(self, cache: WatchedCache) -> None:
        self.cache = cache.cache
        self.wrong: list[str] = []
        self.calls = 0
        self.threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(8)]
        for thread in self.threads:
            thread.start()

    def _run(self, seed: int) -> None:
        blocks = noise(SMALL, range(seed * 100, seed * 100 + 3))
        key = chain(3, seed=seed)
        try:
            while True:
                self.cache.put(key, blocks)
                out = target(SMALL, 3)
                n = self.cache.get(key, out)
                if not same(out[:n], blocks[:n]):
                    self.wrong.append("get")
                with self.cache.acquire(key) as lease:
                    if not all(same(t, b) for t, b in zip(lease.tensors, blocks, strict=False)):
                        self.wrong.append("lease")
                self.cache.lookup(key)
                self.calls += 1
        except ClosedError:
            return
        except BaseException as e:  # noqa: BLE001 - judged by the test
            self.wrong.append(repr(e))


@over("LNTS")
def test_closing_under_load_gives_every_thread_a_result_or_a_clean_error(store: Store, rounds: Rounds) -> None:
    for _ in range(rounds(2, 10)):
        cache = store.open(l1="1MiB")
        users = Users(cache)
        deadline = time.monotonic() + 20
        while users.calls < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        cache.cache.close()
        assert time.monotonic() - began < ENDS_S
        for thread in users.threads:
            thread.join(10)
            assert not thread.is_alive()
        assert users.wrong == []
        assert users.calls >= 20
    with store.open() as cache:
        out = target(SMALL, 3)
        n = cache.get(chain(3, seed=0), out)
        assert same(out[:n], noise(SMALL, range(3))[:n])


@over("LNTS")
def test_one_store_open_twice_in_a_process_works(store: Store) -> None:
    with store.open() as one:
        two = store.open()
        one.store(unrelated(0), noise(SMALL, [0]))
        found = two.fetch(unrelated(0))
        assert found is not None
        assert same(found, noise(SMALL, [0]))
        two.store(unrelated(1), noise(SMALL, [1]))
        two.close()
        for i in (0, 1):  # closing the one does not close the other
            found = one.fetch(unrelated(i))
            assert found is not None
            assert same(found, noise(SMALL, [i]))
        one.store(unrelated(2), noise(SMALL, [2]))
        assert one.fetch(unrelated(2)) is not None
        assert one.tier(TIER).counters.io_errors == 0


# -- few descriptors

FEW = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
before = len(os.listdir("/proc/self/fd"))
with STORE.open() as cache:
    cache.store(unrelated(0), noise(SMALL, [0]))  # whatever is opened late is open now
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    n = int(ARGS[0])
    for i in range(n):
        cache.put(unrelated(i), noise(SMALL, [i]))
        if i % 50 == 49:
            cache.flush(60)
    cache.flush(60)
    there = 0
    for i in range(n):
        found = cache.fetch(unrelated(i))
        assert found is None or same(found, noise(SMALL, [i])), i
        there += found is not None
    held = [open("/dev/null") for _ in range(64 - len(os.listdir("/proc/self/fd")) + 1)]  # none is left
    none_left = [cache.fetch(unrelated(i)) for i in range(20)]
    for i, found in enumerate(none_left):
        assert found is None or same(found, noise(SMALL, [i])), i
    cache.store(unrelated(5000), noise(SMALL, [5000]))
    for one in held:
        one.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    deadline = time.monotonic() + 20
    while (found := cache.fetch(unrelated(0))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found is not None and same(found, noise(SMALL, [0]))
    while (found := cache.fetch(unrelated(6000))) is None and time.monotonic() < deadline:
        cache.store(unrelated(6000), noise(SMALL, [6000]))
        time.sleep(0.05)
    assert found is not None and same(found, noise(SMALL, [6000]))
    lost = [i for i in range(n) if cache.fetch(unrelated(i)) is None]
    counters = cache.tier(TIER).counters
print(json.dumps(dict(there=there, lost=len(lost), refused=counters.refused_medium, corrupt=counters.corrupt)))
"""


@over("LNTS")
def test_a_process_with_few_descriptors_works_and_recovers(store: Store, forge: Forge, rounds: Rounds) -> None:
    n = rounds(200, 1000)
    report = forge.work(FEW, store, n)
    assert report["there"] + report["refused"] >= n
    assert report["lost"] <= report["refused"]
    assert report["corrupt"] == 0
    assert report["there"] > n // 2


@over("LN")
def test_opening_without_descriptors_is_told(store: Store, forge: Forge) -> None:
    told = forge.work(NONE_LEFT, store)
    assert "open files" in told.lower(), told


NONE_LEFT = """
import resource
from kvstore.errors import BackendError
with STORE.open():
    pass
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
try:
    STORE.open().close()
    told = ""
except BackendError as e:
    told = str(e)
for one in held:
    one.close()
with STORE.open() as cache:
    cache.store(unrelated(0), noise(SMALL, [0]))
    assert cache.fetch(unrelated(0)) is not None
print(json.dumps(told))
"""

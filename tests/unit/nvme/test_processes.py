"""Several processes, kills and forks on one store."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kvstore.errors import ClosedError
from kvstore.types import PutStatus
from tests.unit.nvme.stores import (
    MIB,
    NvmeBackend,
    Opener,
    bytes_of,
    call,
    files_bytes,
    item_of,
    name_of,
    put,
    read,
    run,
    script,
)

WRITER = """
b = start(capacity_bytes=16 * MIB, block_bytes=65536, durability=sys.argv[2])
i = 0
while True:
    statuses = put(b, *[item_of(i + k, 20_000 + k * 7770) for k in range(8)])
    assert {s.value for s in statuses} == {"stored"}, statuses
    i += 8
    print(i, flush=True)
"""


def start_process(code: str, store: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(script(code, store, *args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("durability", ["cache", "durable"])
def test_kill_9_loses_nothing_that_was_acknowledged(opener: Opener, tmp_path: Path, durability: str) -> None:
    store = tmp_path / "store"
    first = 0
    for round_ in range(2):
        with start_process(WRITER, store, durability) as process:
            assert process.stdout is not None
            last = next(n for line in process.stdout if (n := int(line)) >= 100 + 200 * round_)
            process.send_signal(signal.SIGKILL)
            acknowledged = max([last, *(int(line) for line in process.stdout if line.endswith("\n"))])
        backend = opener(store, capacity_bytes=16 * MIB, block_bytes=65_536)
        found = read(backend, [name_of(i) for i in range(acknowledged)])
        first = found.count(None)
        assert [i for i, data in enumerate(found) if data not in {None, bytes_of(i, 20_000 + i % 8 * 7770)}] == []
        live = sum(n.nbytes for n in backend.scan())
        assert first == 0 or live > 8 * MIB  # nothing is missing unless it was evicted
        assert None not in found[-60:]
        assert put(backend, item_of(acknowledged)) in ([PutStatus.STORED], [PutStatus.EXISTS])
        assert files_bytes(store) <= 16 * MIB
        names = {path.name for path in store.iterdir()}
        assert names <= {"seg-0000", "index", "kvstore.nvme", "kvstore.regions", "kvstore.epochs", "namespaces"}
        backend.delete_many([name_of(i) for i in range(acknowledged + 1)], call())  # the next round starts at 0
        backend.close()


def test_a_dead_owner_leaves_its_region_to_the_next(opener: Opener, tmp_path: Path) -> None:
    code = """
    b = start()
    put(b, item_of("dead"))
    os.kill(os.getpid(), 9)
    """
    assert run(code, tmp_path / "store").returncode == -9
    backend = opener()
    put(backend, item_of("next"))
    assert read(backend, [name_of("dead"), name_of("next")]) == [bytes_of("dead", 5000), bytes_of("next", 5000)]
    assert backend.describe()["regions"] == "1"


def test_two_processes_append_to_different_regions(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of("parent"))
    before = backend.epoch(b"n" * 16)
    code = """
    b = start()
    assert read(b, [name_of("parent")]) == [bytes_of("parent", 5000)]
    assert b.epoch(b"n" * 16).hex() == sys.argv[2]
    put(b, item_of("child"))
    assert b.describe()["regions"] == "2"
    print(b.epoch(b"n" * 16, bump=True).hex())
    b.close()
    """
    result = run(code, tmp_path / "store", before.hex())
    assert result.returncode == 0, result.stderr
    assert read(backend, [name_of("child")]) == [bytes_of("child", 5000)]
    assert backend.epoch(b"n" * 16).hex() == result.stdout.strip() != before.hex()


RACER = """
import random
rng = random.Random(int(sys.argv[2]))
b = start(capacity_bytes=16 * MIB, block_bytes=131072)
sys.stdin.readline()
def size(i):
    return 5000 + i * 977 % 120_000
for _ in range(25):
    some = [rng.randrange(300) for _ in range(6)]
    assert {s.value for s in put(b, *[item_of(i, size(i)) for i in some])} <= {"stored", "exists"}
    asked = [rng.randrange(300) for _ in range(20)]
    for i, found in zip(asked, read(b, [name_of(i) for i in asked])):
        assert found in {None, bytes_of(i, size(i))}, i
    if rng.random() < 0.1:
        b.maintain()
b.close()
"""


def test_processes_put_read_and_evict_at_once_without_a_wrong_byte(tmp_path: Path, opener: Opener) -> None:
    processes = [start_process(RACER, tmp_path / "store", str(seed)) for seed in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [p.returncode for p in processes] == [0, 0, 0]
    backend = opener(capacity_bytes=16 * MIB, block_bytes=131_072)
    assert files_bytes(tmp_path / "store") <= 16 * MIB
    infos = list(backend.scan())
    usage = backend.usage()
    assert len(infos) == usage.records
    assert usage.payload_bytes >= sum(info.nbytes for info in infos)


def test_opening_and_closing_at_once_never_fails(tmp_path: Path) -> None:
    code = """
    for i in range(5):
        b = start()
        put(b, item_of(f"{os.getpid()}-{i}", 3000))
        assert read(b, [name_of(f"{os.getpid()}-{i}")]) == [bytes_of(f"{os.getpid()}-{i}", 3000)]
        b.close()
    """
    processes = [start_process(code, tmp_path / "store") for _ in range(3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [p.returncode for p in processes] == [0] * 3


def test_a_forked_child_gets_closed_error_and_may_open_anew(tmp_path: Path) -> None:
    code = """
    from kvstore.errors import ClosedError
    b = start()
    put(b, item_of("parent"))
    child = os.fork()
    if child == 0:
        for use in (lambda: read(b, [name_of("parent")]), lambda: put(b, item_of(1)), lambda: b.touch_many([b"x"]), b.usage):
            try:
                use()
            except ClosedError as e:
                assert "fork" in str(e)
            else:
                os._exit(3)
        b.close()
        own = start()
        assert read(own, [name_of("parent")]) == [bytes_of("parent", 5000)]
        put(own, item_of("child"))
        own.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read(b, [name_of("parent"), name_of("child")]) == [bytes_of("parent", 5000), bytes_of("child", 5000)]
    assert put(b, item_of("after"))[0].value == "stored"
    b.close()
    """
    result = run(code, tmp_path / "store")
    assert result.returncode == 0, result.stderr


def test_forking_under_load_disturbs_neither_side(tmp_path: Path) -> None:
    code = """
    import threading, warnings
    warnings.simplefilter("ignore")  # newer interpreters warn about fork with threads
    b = start()
    stop = threading.Event()
    wrong = []
    def work(t):
        i = 0
        while not stop.is_set():
            put(b, item_of(f"{t}-{i % 50}", 20_000))
            if read(b, [name_of(f"{t}-{i % 50}")]) != [bytes_of(f"{t}-{i % 50}", 20_000)]:
                wrong.append(i)
            i += 1
    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads: thread.start()
    for k in range(4):
        child = os.fork()
        if child == 0:
            c = start()
            put(c, item_of(f"child-{k}"))
            ok = read(c, [name_of(f"child-{k}")]) == [bytes_of(f"child-{k}", 5000)]
            c.close()
            os._exit(0 if ok else 4)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    for thread in threads: thread.join()
    assert wrong == []
    assert None not in read(b, [name_of(f"child-{k}") for k in range(4)])
    b.close()
    """
    result = run(code, tmp_path / "store", timeout_s=60)
    assert result.returncode == 0, result.stderr


def test_backends_of_one_process_share_a_directory(opener: Opener) -> None:
    one, two = opener(), opener()
    put(one, item_of(1))
    assert read(two, [name_of(1)]) == [bytes_of(1, 5000)]
    one.close()
    assert put(two, item_of(2)) == [PutStatus.STORED]
    with pytest.raises(ClosedError):
        read(one, [name_of(1)])
    one.close()


def test_many_cycles_leave_no_descriptor_and_no_thread(tmp_path: Path, opener: Opener) -> None:
    def cycle(k: int) -> None:
        backend = opener()
        put(backend, item_of(k))
        assert read(backend, [name_of(k)]) == [bytes_of(k, 5000)]
        backend.close()

    for k in range(3):
        cycle(k)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for k in range(20):
        cycle(100 + k)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_closing_while_threads_use_the_store_ends_within_5_s(opener: Opener) -> None:
    backend: NvmeBackend = opener()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                put(backend, item_of(time.monotonic_ns() % 100))
                read(backend, [name_of(i) for i in range(100)])
        except ClosedError:
            pass
        except BaseException as e:  # noqa: BLE001 - handed to the main thread
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    backend.close()
    assert time.monotonic() - start < 5
    for thread in threads:
        thread.join(5)
    assert not errors

"""Several processes, kills and forks on one store."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest
from kvstore_lmdb.backend import LmdbBackend

from kvstore.errors import ClosedError
from kvstore.types import PutStatus
from tests.unit.lmdb.stores import Opener, bytes_of, call, item_of, name_of, put, read, run, script

WRITER = """
b = start()
i = 0
while True:
    statuses = put(b, *[item_of(i + k, 20_000 + k * 777) for k in range(8)])
    assert {s.value for s in statuses} == {"stored"}
    i += 8
    print(i, flush=True)
"""


def start_process(code: str, store: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(script(code, store, *args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def lines_until(process: subprocess.Popen[str], wanted: int) -> int:
    """Read acknowledgements until one reaches ``wanted``; return the last one."""
    assert process.stdout is not None
    return next(n for line in process.stdout if (n := int(line)) >= wanted)


@pytest.mark.parametrize("round_", range(3))
def test_kill_9_loses_nothing_that_was_acknowledged(opener: Opener, tmp_path: Path, round_: int) -> None:
    store = tmp_path / "store"
    with start_process(WRITER, store) as process:
        last = lines_until(process, 200 + 90 * round_)
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        acknowledged = max([last, *(int(line) for line in process.stdout if line.endswith("\n"))])
    backend = opener(store, capacity_bytes=64 << 20)
    usage = backend.usage()
    names = [name_of(i) for i in range(acknowledged)]
    found = read(backend, names)
    first = found.count(None)
    assert first == 0 or usage.payload_bytes > 60 << 20  # nothing is missing unless it was evicted
    assert found[first:] == [bytes_of(i, 20_000 + i % 8 * 777) for i in range(first, acknowledged)]
    infos = list(backend.scan())
    assert len(infos) == usage.records
    pages = sum((16 + i.nbytes + 4095) // 4096 for i in infos)
    assert 0 <= usage.payload_bytes // 4096 - pages <= 4 + usage.records // 8
    assert put(backend, item_of("next")) == [PutStatus.STORED]


def test_two_processes_share_records_and_epochs(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of("parent"))
    before = backend.epoch(b"n" * 16)
    code = """
    b = start()
    assert read(b, [name_of("parent")]) == [bytes_of("parent", 5000)]
    assert b.epoch(b"n" * 16).hex() == sys.argv[2]
    put(b, item_of("child"))
    print(b.epoch(b"n" * 16, bump=True).hex())
    b.close()
    """
    result = run(code, tmp_path / "store", before.hex())
    assert result.returncode == 0, result.stderr
    assert read(backend, [name_of("child")]) == [bytes_of("child", 5000)]
    assert backend.epoch(b"n" * 16).hex() == result.stdout.strip() != before.hex()


def test_an_epoch_is_kept_apart_by_namespace_and_over_a_restart(opener: Opener) -> None:
    backend = opener()
    one, two = backend.epoch(b"1" * 16), backend.epoch(b"2" * 16)
    assert len(one) == 8
    assert one != two
    bumped = backend.epoch(b"1" * 16, bump=True)
    assert bumped != one
    backend.close()
    again = opener()
    assert (again.epoch(b"1" * 16), again.epoch(b"2" * 16)) == (bumped, two)


def test_racing_processes_store_each_record_once(tmp_path: Path, opener: Opener) -> None:
    code = """
    b = start()
    sys.stdin.readline()
    for i in range(100):
        assert put(b, item_of(i, 30_000))[0].value in {"stored", "exists"}
        found = read(b, [name_of(i), name_of(99 - i)])
        assert found[0] == bytes_of(i, 30_000) and found[1] in {None, bytes_of(99 - i, 30_000)}
    b.close()
    """
    processes = [start_process(code, tmp_path / "store") for _ in range(3)]
    for process in processes:
        process.communicate("go\n", timeout=60)
    assert [p.returncode for p in processes] == [0, 0, 0]
    backend = opener()
    assert backend.usage().records == 100
    assert read(backend, [name_of(i) for i in range(100)]) == [bytes_of(i, 30_000) for i in range(100)]


def test_opening_and_closing_at_once_never_fails(tmp_path: Path) -> None:
    code = """
    for i in range(15):
        b = start()
        put(b, item_of(f"{os.getpid()}-{i}", 3000))
        assert read(b, [name_of(f"{os.getpid()}-{i}")]) == [bytes_of(f"{os.getpid()}-{i}", 3000)]
        b.close()
    """
    processes = [start_process(code, tmp_path / "store") for _ in range(4)]
    for process in processes:
        process.communicate(timeout=60)
    assert [p.returncode for p in processes] == [0] * 4


def test_dead_readers_neither_fill_the_table_nor_pin_pages(opener: Opener, tmp_path: Path) -> None:
    backend = opener()
    put(backend, item_of(1))
    code = """
    b = start()
    for i in range(50):
        if os.fork() == 0:
            c = start()
            c.get_many([name_of(1)], lambda i, v: os.kill(os.getpid(), 9), call())
        os.wait()
    b.close()
    """
    result = run(code, tmp_path / "store")
    assert result.returncode == 0, result.stderr
    session = backend._session
    assert session is not None
    assert session.store is not None
    env = session.store.env
    pinned = [line for line in env.readers().splitlines()[1:] if line.split()[-1] != "-"]
    assert pinned
    backend.maintain()  # the first call checks at once, later ones each minute
    assert [line for line in env.readers().splitlines()[1:] if line.split()[-1] != "-"] == []


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
    put(b, item_of("after"))
    b.close()
    assert '"clean"' in (STORE / "kvstore.state").read_text()
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
    for k in range(5):
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
    assert not wrong
    assert read(b, [name_of(f"child-{k}") for k in range(5)]) == [bytes_of(f"child-{k}", 5000) for k in range(5)]
    b.close()
    """
    result = run(code, tmp_path / "store")
    assert result.returncode == 0, result.stderr


def test_a_fork_inside_receive_leaves_the_parent_alone(tmp_path: Path) -> None:
    code = """
    b = start()
    put(b, item_of(1))
    def receive(i, view):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert bytes(view) == bytes_of(1, 5000)
    b.get_many([name_of(1)], receive, call())
    assert read(b, [name_of(1)]) == [bytes_of(1, 5000)]
    b.close()
    """
    result = run(code, tmp_path / "store")
    assert result.returncode == 0, result.stderr


def test_leaving_without_close_is_quiet_and_loses_nothing(opener: Opener, tmp_path: Path) -> None:
    result = run("b = start(); put(b, item_of(1)); sys.exit(0)", tmp_path / "store")
    assert (result.returncode, result.stderr) == (0, "")
    assert read(opener(), [name_of(1)]) == [bytes_of(1, 5000)]


def test_two_backends_on_one_directory_share_and_close_apart(opener: Opener) -> None:
    one, two = opener(), opener()
    put(one, item_of(1))
    assert read(two, [name_of(1)]) == [bytes_of(1, 5000)]
    one.close()
    assert put(two, item_of(2)) == [PutStatus.STORED]
    assert read(two, [name_of(1), name_of(2)]) == [bytes_of(1, 5000), bytes_of(2, 5000)]
    with pytest.raises(ClosedError):
        one.usage()


def test_every_backend_of_the_process_hears_of_evictions(opener: Opener) -> None:
    heard: list[list[bytes]] = [[], []]
    one, two = [opener(capacity_bytes=2 << 20, removed=h.extend) for h in heard]
    put(one, *[item_of(i, 100_000) for i in range(25)])
    assert heard[0] == heard[1]
    assert heard[0]
    two.close()
    put(one, *[item_of(i, 100_000) for i in range(25, 30)])
    assert len(heard[0]) > len(heard[1])


def test_close_ends_while_other_threads_use_the_store(opener: Opener) -> None:
    backend = opener()
    put(backend, *[item_of(i, 100_000) for i in range(20)])
    odd: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                for i, data in enumerate(read(backend, [name_of(i) for i in range(20)])):
                    assert data in {None, bytes_of(i, 100_000)}
                put(backend, item_of("w", 1000))
        except ClosedError:
            return
        except BaseException as e:  # noqa: BLE001 - whatever it is, the test shows it
            odd.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    backend.close()
    for thread in threads:
        thread.join(10)
    assert not odd
    assert not any(thread.is_alive() for thread in threads)


def test_close_does_not_wait_for_ever_for_a_reader_that_hangs(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_lmdb.shared_stores._CLOSE_S", 0.05)
    backend = opener()
    put(backend, item_of(1))
    inside, go = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def receive(_i: int, view: memoryview) -> None:
        inside.set()
        go.wait(30)
        seen.append(bytes(view))

    reader = threading.Thread(target=lambda: backend.get_many([name_of(1)], receive, call()))
    reader.start()
    inside.wait(30)
    backend.close()
    go.set()
    reader.join()
    assert seen == [bytes_of(1, 5000)]
    monkeypatch.setattr("kvstore_lmdb.shared_stores._CLOSE_S", 10.0)
    assert read(opener(), [name_of(1)]) == [bytes_of(1, 5000)]


def test_open_and_close_leave_no_descriptors_or_threads(opener: Opener) -> None:
    def cycle() -> None:
        backend: LmdbBackend = opener()
        put(backend, item_of(1))
        read(backend, [name_of(1)])
        backend.close()

    cycle()
    before = (len(list(Path("/proc/self/fd").iterdir())), threading.active_count())
    for _ in range(30):
        cycle()
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before


def test_misses_and_errors_leave_no_reader(backend: LmdbBackend) -> None:
    put(backend, item_of(1))

    def fail(_i: int, _view: memoryview) -> None:
        raise ValueError

    def work() -> None:
        read(backend, [name_of("absent")])
        with pytest.raises(ValueError, match=r"^$"):
            backend.get_many([name_of(1)], fail, call())

    threads = [threading.Thread(target=work) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session = backend._session
    assert session is not None
    assert session.store is not None
    assert [r for r in session.store.env.readers().splitlines()[1:] if r.split()[-1] != "-"] == []

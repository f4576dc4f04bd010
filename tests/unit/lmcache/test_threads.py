"""Threads between an event loop and the store."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable

import pytest
from kvstore_lmcache.tasks import TaskBoard
from kvstore_lmcache.threads import Threads


def test_the_event_loop_goes_on_while_a_read_waits() -> None:
    gate, threads = threading.Event(), Threads(1)

    async def run() -> int:
        reading = asyncio.ensure_future(threads.read(lambda: gate.wait(10)))
        ticks = 0
        while not reading.done():
            await asyncio.sleep(0)
            ticks += 1
            if ticks == 100:
                gate.set()
        return ticks

    assert asyncio.run(run()) >= 100
    threads.close()


def test_a_result_that_nobody_waits_for_is_discarded_once() -> None:
    begun, gate, discarded, seen = threading.Event(), threading.Event(), threading.Event(), []
    threads = Threads(1)

    def work() -> str:
        begun.set()
        gate.wait(10)
        return "result"

    def discard(result: str) -> None:
        seen.append(result)
        discarded.set()

    async def run() -> None:
        reading = asyncio.ensure_future(threads.read(work, discard))
        await asyncio.to_thread(begun.wait, 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
    gate.set()
    assert discarded.wait(10)
    assert seen == ["result"]
    threads.close()


def test_a_read_that_was_awaited_is_not_discarded() -> None:
    threads = Threads(1)
    seen: list[int] = []

    assert asyncio.run(threads.read(lambda: 5, seen.append)) == 5
    threads.close()
    assert seen == []


def test_pieces_run_at_once_and_come_back_in_order() -> None:
    threads, both = Threads(2), threading.Barrier(2)
    seen: list[int] = []

    def work(number: int) -> int:
        both.wait(10)
        return number

    assert asyncio.run(threads.read_all([lambda: work(1), lambda: work(2)], seen.append)) == [1, 2]
    threads.close()
    assert seen == []


def test_a_piece_that_fails_discards_the_others() -> None:
    threads = Threads(2)
    seen: list[str] = []

    def fail() -> str:
        raise OSError("no")

    async def run() -> None:
        with pytest.raises(OSError, match="no"):
            await threads.read_all([lambda: "a", fail, lambda: "b"], seen.append)
        await asyncio.sleep(0)  # callbacks of tasks run in the loop

    asyncio.run(run())
    threads.close()
    assert sorted(seen) == ["a", "b"]


def test_pieces_that_nobody_waits_for_are_discarded_whether_they_have_ended_or_not() -> None:
    threads, gate, done = Threads(2), threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> str:
        done.set()
        return "ended"

    def second() -> str:
        gate.wait(10)
        return "running"

    async def run() -> None:
        reading = asyncio.ensure_future(threads.read_all([first, second], seen.append))
        await asyncio.to_thread(done.wait, 10)
        await asyncio.sleep(0.05)  # the first piece's task ends in the loop
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.sleep(0)

    asyncio.run(run())
    gate.set()
    threads.close()
    assert sorted(seen) == ["ended", "running"]


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_write_its_end_is_told_once(fails: bool) -> None:
    threads, ends = Threads(1), []

    def work() -> None:
        if fails:
            raise OSError("no")

    async def run() -> None:
        if fails:
            with pytest.raises(OSError, match="no"):
                await threads.write(work, lambda: ends.append("end"))
        else:
            await threads.write(work, lambda: ends.append("end"))

    asyncio.run(run())
    threads.close()
    assert ends == ["end"]


def test_a_write_that_is_cancelled_before_it_begins_is_told_its_end() -> None:
    gate, begun, threads = threading.Event(), threading.Event(), Threads(1)
    ends: list[int] = []

    def first() -> None:
        begun.set()
        gate.wait(10)

    async def run() -> None:
        running = asyncio.ensure_future(threads.write(first, lambda: ends.append(1)))
        await asyncio.to_thread(begun.wait, 10)
        waiting = asyncio.ensure_future(threads.write(lambda: ends.append(0), lambda: ends.append(2)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        await running

    asyncio.run(run())
    threads.close()
    assert ends == [2, 1]


def test_after_the_end_nothing_begins_and_ends_are_told() -> None:
    threads, ends = Threads(1), []
    threads.close()

    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(threads.read(lambda: 1))
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(threads.write(lambda: None, lambda: ends.append("end")))
    threads.close()
    assert ends == ["end"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    threads = Threads(1)
    assert asyncio.run(threads.read(os.getpid)) == os.getpid()
    reader, writer = os.pipe()

    child = os.fork()
    if child == 0:
        ok = asyncio.run(asyncio.wait_for(threads.read(os.getpid), 5)) == os.getpid()
        os.write(writer, b"y" if ok else b"n")
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 1)
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    assert answer == b"y"
    threads.close()


def board_with(notify: Callable[[], None] = lambda: None, threads: int = 2) -> TaskBoard[str]:
    return TaskBoard(itertools.count(), threads, notify, "test")


def test_a_result_is_there_when_it_is_signaled_and_can_be_taken_once() -> None:
    signaled = threading.Event()
    board = board_with(signaled.set)

    task = board.submit(lambda: "done", "failed")

    assert signaled.wait(10)
    assert board.take(task) == "done"
    assert board.take(task) is None
    board.close()


def test_work_that_raises_has_the_failed_result(caplog: pytest.LogCaptureFixture) -> None:
    signaled = threading.Event()
    board = board_with(signaled.set)

    def work() -> str:
        raise OSError("broken")

    task = board.submit(work, "failed")

    assert signaled.wait(10)
    assert board.take_all() == {task: "failed"}
    assert "broken" in caplog.text
    board.close()


def test_a_closed_board_answers_failed_at_once() -> None:
    board = board_with()
    board.close()

    assert board.take(board.submit(lambda: "done", "failed")) == "failed"


def test_boards_that_share_numbers_never_give_one_twice() -> None:
    ids = itertools.count()
    one, two = TaskBoard[str](ids, 1, lambda: None, "a"), TaskBoard[str](ids, 1, lambda: None, "b")

    numbers = [board.submit(lambda: "", "") for _ in range(50) for board in (one, two)]

    assert len(set(numbers)) == 100
    one.close()
    two.close()

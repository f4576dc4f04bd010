"""What is remembered of blocks: the newest event, a bounded number, and nothing from before a clear."""

from __future__ import annotations

import threading
import time

from kvstore.history import Event, History


def digest(i: int) -> bytes:
    return i.to_bytes(32, "little")


def events(history: History, *blocks: int) -> list[Event | None]:
    return [None if note is None else note.event for note in history.of([digest(i) for i in blocks])]


def test_the_newest_event_of_a_block_counts() -> None:
    history = History()
    history.note([digest(0), digest(1)], Event.STORED)
    history.note([digest(1)], Event.REFUSED, "full")
    assert events(history, 0, 1, 2) == [Event.STORED, Event.REFUSED, None]
    note = history.of([digest(1)])[0]
    assert note is not None
    assert note.detail == "full"
    assert time.time() - 60 < note.at <= time.time()


def test_the_oldest_are_forgotten_and_a_new_event_makes_a_block_new() -> None:
    history = History(limit=80)
    history.note([digest(i) for i in range(80)], Event.STORED)
    history.note([digest(0)], Event.EVICTED)
    history.note([digest(100)], Event.STORED)
    assert len(history) <= 80
    assert events(history, 0, 100, 1, 79) == [Event.EVICTED, Event.STORED, None, Event.STORED]


def test_more_blocks_at_once_than_are_remembered_stay_within_the_bound() -> None:
    history = History(limit=16)
    history.note([digest(i) for i in range(1000)], Event.STORED)
    assert 0 < len(history) <= 16
    assert events(history, 999) == [Event.STORED]


def test_a_clear_ends_every_story_and_is_the_story_of_what_was_stored() -> None:
    history = History()
    assert history.cleared is None
    history.note([digest(0)], Event.STORED)
    history.note([digest(1)], Event.REFUSED, "full")
    history.clear("by this process")
    assert events(history, 0, 1) == [Event.CLEARED, None]
    assert history.cleared is not None
    history.note([digest(0)], Event.STORED)
    assert events(history, 0) == [Event.STORED]


def test_many_threads_may_note_at_once() -> None:
    history = History(limit=64)

    def work(start: int) -> None:
        for i in range(500):
            history.note([digest(start + i % 50)], Event.STORED)
            history.of([digest(start)])
            if i % 100 == 0:
                history.clear()

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(history) <= 64

"""Ranks as threads of one process: real links and a real store, without the cost of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from kvstore import KVCache
from kvstore.group import Agreement, Clock, question
from kvstore.stats import GroupCounters

T = TypeVar("T")

DEADLINE_S = 1.0
QUESTION = question("test")
SLACK_S = 1.5  # for a busy machine


def all_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run each call in a thread of its own; the first exception is raised when all have ended."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as e:  # noqa: BLE001 - raised below
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


def groups(size: int) -> list[ProcessGroup]:
    """One group as each of its ranks sees it."""
    store = HashStore()
    return [ProcessGroup(store, rank, size) for rank in range(size)]


def join(there: Sequence[ProcessGroup]) -> list[Agreement]:
    """Let every rank join its group."""
    joined = all_at_once([lambda group=group: Agreement.join(group) for group in there])  # type: ignore[misc]
    agreements = [agreement for agreement in joined if agreement is not None]
    assert len(agreements) == len(there)
    return agreements


def ranks(size: int) -> list[Agreement]:
    """Agreements of ranks that have met once, so that their links are up."""
    agreements = join(groups(size))
    assert ask(agreements, [[1]] * size, deadline_s=20.0) == [[1]] * size
    return agreements


def ask(
    agreements: Sequence[Agreement],
    values: Sequence[Sequence[int]],
    *,
    asked: Sequence[int] = (),
    deadline_s: float = DEADLINE_S,
) -> list[list[int]]:
    """Let every rank ask at once."""
    questions = asked or [QUESTION] * len(agreements)

    def one(i: int) -> list[int]:
        return agreements[i].agree(questions[i], values[i], Clock.start(deadline_s))

    return all_at_once([lambda i=i: one(i) for i in range(len(agreements))])  # type: ignore[misc]


def on_each(caches: Sequence[KVCache], call: Callable[[KVCache], T]) -> list[T]:
    """Make the same call on every rank's cache."""
    return all_at_once([lambda cache=cache: call(cache) for cache in caches])  # type: ignore[misc]


def counted(caches: Sequence[KVCache], name: str) -> list[int]:
    """One counter of the group on every rank."""
    counters = [cache.stats().group for cache in caches]
    assert all(isinstance(c, GroupCounters) for c in counters)
    return [getattr(c, name) for c in counters]

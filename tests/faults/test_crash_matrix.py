"""Writers killed at any moment, hundreds of times over one store: nothing torn, nothing lost, nothing left over."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.objects.naming import holds_records
from kvstore.objects.pack import index_room
from tests.faults.conftest import Rounds
from tests.faults.crash_account import unaccounted, unaccounted_when_closed
from tests.faults.crash_board import Board, Trap, random_trap
from tests.faults.crash_writer import CHAIN_BLOCKS, CHAINS, SPEC, Job, backend_of, blocks_of, delivered, key_of
from tests.faults.media import MEDIA, S3Store
from tests.faults.process import Forge, Worker
from tests.faults.s3_faults import Stored
from tests.faults.s3_process import Objects, S3Process
from tests.faults.store import MIB, Store, over
from tests.support_faults import WatchedCache

WRITER = "from tests.faults.crash_writer import live; live(STORE, *ARGS)"
SIGNALS = {-signal.SIGKILL, -signal.SIGALRM}
OPEN_S = 10.0  # what KVCache.open itself allows; alone it takes a tenth of a second
TRAPS = ("open", "close", "put_many", "publish", "queue", "get", "delete", "clear", "reclaim", "eviction")


class BucketElsewhere(S3Store):
    """Objects of a server that outlives the writers."""

    def __init__(self, root: Path, process: S3Process) -> None:
        super().__init__(root, process.url)
        self.process = process

    @classmethod
    def make(cls, root: Path) -> Store:
        return cls(root, S3Process(cls.BUCKET))

    def _objects(self) -> MutableMapping[str, Stored]:
        return Objects(self.process)

    def heads(self) -> dict[str, tuple[int, bytes]]:
        """Length and start of every object that holds records, its whole index included."""
        found = self.process.ask("heads", nbytes=index_room(CHAIN_BLOCKS)).items()
        names = ((key.removeprefix(f"{self.PREFIX}/"), nbytes, head) for key, (nbytes, head) in found)
        return {key: (nbytes, bytes.fromhex(head)) for key, nbytes, head in names if holds_records(key)}

    def used_bytes(self) -> int:
        return 0  # nobody bounds a bucket

    def close(self) -> None:
        self.process.close()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, nothing_left_behind: None) -> Iterator[Store]:
    """As everywhere, but the S3 server is a process of its own."""
    kind = BucketElsewhere if request.param == "s3" else MEDIA[request.param]
    made = kind.make(tmp_path / request.param)
    yield made
    made.close()


@dataclass
class Ledger:
    """What one writer's chains must be, from all that it said.

    Attributes:
        stored: Chains that it was told are stored, in the order in which it was.
        absent: Chains that it was told are gone.
        unsure: Chains with a call under way at a kill.
        missing: Chains that are nowhere, as far as is known.
        fresh: Chains that were missing and then stored, since somebody looked.
        in_flight: What the last put was about that was not said to be stored.
    """

    stored: dict[int, None] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=lambda: set(range(CHAINS)))
    fresh: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)

    def take(self, said: dict[str, Any]) -> None:
        for i in [*said.get("put", ()), *([said["delete"]] if "delete" in said else ())]:
            if i not in self.stored or "delete" in said:
                self.doubt(i)
        if "put" in said:
            self.in_flight = said["put"]
        for i in said.get("stored", ()):
            self.settle(i)
        if "deleted" in said:
            self.forget(said["deleted"])

    def doubt(self, i: int) -> None:
        self.stored.pop(i, None)
        self.absent.discard(i)
        self.unsure.add(i)

    def settle(self, i: int) -> None:
        self.doubt(i)
        self.unsure.discard(i)
        self.stored[i] = None
        if i in self.missing:  # what was there already was not stored again, and may be as old as it was
            self.missing.remove(i)
            self.fresh.append(i)
        self.in_flight = [k for k in self.in_flight if k != i]

    def forget(self, i: int) -> None:
        self.doubt(i)
        self.unsure.discard(i)
        self.absent.add(i)
        self.missing.add(i)

    def clear(self, *, done: bool) -> None:
        for i in [*self.stored, *self.unsure]:
            if done:
                self.forget(i)
            else:
                self.doubt(i)


@dataclass
class Report:
    """Numbers of many rounds."""

    kills: Counter[str] = field(default_factory=Counter)
    reopen_s: list[float] = field(default_factory=list)
    checked: int = 0
    evicted: int = 0
    rounds: int = 0

    def text(self) -> str:
        took = sorted(self.reopen_s)
        return (
            f"{self.rounds} rounds, {sum(self.kills.values())} kills: {dict(self.kills.most_common())}; reopened in "
            f"{1e3 * took[len(took) // 2]:.0f} ms (median), {1e3 * took[-1]:.0f} ms (longest); "
            f"{self.checked} blocks checked, {self.evicted} evicted; torn 0, lost 0, left over 0"
        )


class Matrix:
    """Rounds of writing, killing, reopening and judging on one store."""

    def __init__(self, store: Store, forge: Forge, folder: Path, capacity: str, *, tight: bool) -> None:
        self.store, self.forge, self.folder, self.capacity, self.tight = store, forge, folder, capacity, tight
        self.rng = random.Random(f"{store.kind} {capacity}")
        self.ledgers = [Ledger(), Ledger()]
        self.report = Report()

    def run(self, rounds: int) -> None:
        with self.store.open(spec=SPEC, capacity=self.capacity):
            pass
        traps = [t for t in TRAPS if t != "eviction" or self.tight]
        for n in range(rounds):
            trap = random_trap(self.rng, traps[n % len(traps)]) if n % 4 else None
            alone = n % 3 != 2 or (trap is not None and trap.phase in {"clear", "reclaim"})
            self.kill(trap, writers=1 if alone else 2)
            self.judge(alone=alone)
        self.report.rounds += rounds

    def kill(self, trap: Trap | None, writers: int) -> None:
        """Start writers and let the first one be killed, at a random moment or in a phase; the second sometimes, too."""
        for ledger in self.ledgers:
            ledger.fresh.clear()
        boards = [Board.make(self.folder / f"board-{who}") for who in range(writers)]
        jobs = [self.job(who, trap if who == 0 else None, alone=writers == 1) for who in range(writers)]
        workers = [self.forge.start(WRITER, self.store, job.to_json()) for job in jobs]
        try:
            if trap is None:
                assert json.loads(workers[0].line()) == {"ready": True}
                time.sleep(self.rng.uniform(0.0, 0.3))
                workers[0].kill()
            self.listen(workers[0], boards[0], 0)
            if writers == 2:
                if self.rng.random() < 0.5:
                    workers[1].kill()
                self.listen(workers[1], boards[1], 1)
        finally:
            for worker in workers:
                worker.__exit__()

    def job(self, who: int, trap: Trap | None, *, alone: bool) -> Job:
        return Job(
            board=str(self.folder / f"board-{who}"),
            who=who,
            seed=self.rng.randrange(1 << 30),
            capacity=self.capacity,
            clears=alone,
            steps=self.rng.randint(2, 8) if trap is not None and trap.phase == "close" else 30,
            trap=None if trap is None else asdict(trap),
        )

    def listen(self, worker: Worker, board: Board, who: int) -> None:
        """Take all that a writer says until it ends; it ends well, or by the kill, and by nothing else."""
        for line in worker.lines():
            said = json.loads(line)
            if "clear" in said or "cleared" in said:
                for ledger in self.ledgers:
                    ledger.clear(done="cleared" in said)
            self.ledgers[who].take(said)
        assert worker.exit_code in SIGNALS | {0}, (worker.exit_code, worker.errors[-3000:])
        if worker.exit_code:
            self.report.kills[board.now()] += 1

    def judge(self, *, alone: bool) -> None:
        began = time.monotonic()
        with self.store.open(spec=SPEC, capacity=self.capacity) as cache:
            took_s = time.monotonic() - began
            self.report.reopen_s.append(took_s)
            assert took_s < OPEN_S
            for who, ledger in enumerate(self.ledgers):
                newest = [i for i in ledger.fresh[-3:] if i in ledger.stored] if alone else []
                self.judge_chains(cache, who, newest)
            odd = unaccounted(self.store, backend_of(cache))
            assert odd == "", odd
            assert self.store.used_bytes() <= self.store.bound(self.capacity_bytes)
        with self.store.open(
            spec=SPEC, capacity=self.capacity
        ) as cache:  # anew: the reads above were uses of the others
            self.put_again(cache)
        odd = unaccounted_when_closed(self.store)
        assert odd == "", odd

    def judge_chains(self, cache: WatchedCache, who: int, newest: Sequence[int]) -> None:
        """Args: newest: What nobody has made room for since it was stored."""
        ledger = self.ledgers[who]
        stored = list(ledger.stored)
        there = {i: delivered(cache, who, i) for i in [*stored, *ledger.absent, *ledger.unsure]}  # exact or not there
        self.report.checked += sum(map(sum, there.values()))
        back = [i for i in ledger.absent if any(there[i])]
        assert back == [], f"chains {back} of writer {who} are there again"
        ledger.missing |= {i for i, found in there.items() if not any(found)}
        missing = [i for i in stored if not all(there[i])]
        if missing and self.tight:
            self.report.evicted += sum(there[i].count(False) for i in missing)
            safe = [i for i in newest if i in missing]
            assert safe == [], f"chains {safe} of writer {who} are lost: they are the newest"
            payload = backend_of(cache).usage().payload_bytes
            assert payload > self.capacity_bytes // 3, f"{missing} are lost: only {payload} bytes are taken"
            for i in missing:
                ledger.doubt(i)
        else:
            assert missing == [], f"chains {missing} of writer {who} are lost"

    def put_again(self, cache: WatchedCache) -> None:
        """What was under way at the kill can be stored now."""
        for who, ledger in enumerate(self.ledgers):
            for i in [k for k in ledger.in_flight if k in ledger.unsure]:
                before = delivered(cache, who, i)
                cache.store(key_of(who, i), blocks_of(who, i))
                after = delivered(cache, who, i)
                assert all(after), f"chain {i} of {who} cannot be stored: {before}, {after}, {cache.stats().tiers}"
                ledger.settle(i)

    @property
    def capacity_bytes(self) -> int:
        return int(self.capacity.removesuffix("MiB")) * MIB


@over("LNTS")
def test_a_killed_writer_loses_nothing_it_was_told_is_stored(
    store: Store, forge: Forge, tmp_path: Path, rounds: Rounds
) -> None:
    matrix = Matrix(store, forge, tmp_path, "64MiB", tight=False)
    matrix.run(rounds(18, 300 if store.kind == "s3" else 180))
    assert len(matrix.report.kills) >= 4, matrix.report.text()
    print(f"\n{store.kind}, roomy: {matrix.report.text()}")


@over("LNT")
def test_a_writer_killed_at_capacity_leaves_a_sound_full_store(
    store: Store, forge: Forge, tmp_path: Path, rounds: Rounds
) -> None:
    matrix = Matrix(store, forge, tmp_path, "8MiB", tight=True)
    matrix.run(rounds(12, 150))
    assert 2 * CHAINS * CHAIN_BLOCKS * SPEC.nbytes > 2 * matrix.capacity_bytes
    assert matrix.report.evicted > 0
    print(f"\n{store.kind}, at capacity: {matrix.report.text()}")

"""Read a million hostile records: ``python tests/fuzz/hostile_million.py --records 1000000 --seed 1``.

Every record is damaged as :mod:`tests.fuzz.mutate` can, then read whole and segment by segment.  The
run ends with the first law that breaks and prints the input; otherwise it prints what became of the
records, the largest allocation and how the process grew.  A seed repeats a run whatever the number of
workers.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, too

from tests.fuzz.hostile_records import ASKED, CONSTANT_BYTES, allocated_bytes, allocation_limit, examine
from tests.fuzz.mutate import asked, base_record, damaged
from tests.fuzz.worlds import KNOWN, LARGE, WORLDS, sound

BATCH: Final = 1000
MEASURED_EVERY: Final = 20
"""Records between two whose allocations are traced, which takes five times as long."""

_SMALL: Final = tuple(i for i in range(len(WORLDS)) if i not in LARGE)


@dataclass
class Tally:
    """What became of some records.

    Attributes:
        outcomes: Records by outcome, see :func:`tests.fuzz.hostile_records.examine`.
        codecs: Deliveries by codec of the world.
        peak_bytes: Largest traced allocation, less what a block may take, see
            :func:`tests.fuzz.hostile_records.allocation_limit`.
        rss_bytes: Largest resident size of a worker.
        failures: What broke a law, and the input as the fuzz target ``record`` takes it.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    rss_bytes: int = 0
    failures: list[tuple[str, bytes]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in another part of the run."""
        self.outcomes += other.outcomes
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.rss_bytes = max(self.rss_bytes, other.rss_bytes)
        self.failures += other.failures


def hostile(rng: random.Random) -> tuple[int, bytes, bytes]:
    """A world's place, a digest that is asked for, and what stands in the record's place."""
    index = rng.choice(sorted(LARGE)) if rng.randrange(400) == 0 else rng.choice(_SMALL)
    here = sound(index)
    stranger = sound(rng.choice(_SMALL))
    other = rng.choice((here.records[KNOWN[1]], stranger.records[KNOWN[0]]))
    return index, asked(rng), damaged(rng, base_record(rng, here.world, here.records), other)


def run_batch(job: tuple[int, int, int]) -> Tally:
    """Read one batch: ``(seed, number of the batch, records)``."""
    seed, number, n_records = job
    rng = random.Random(f"{seed}/{number}")
    tally = Tally()
    for i in range(n_records):
        index, digest, record = hostile(rng)
        try:
            tally.outcomes[examine(index, digest, record)] += 1
            if i % MEASURED_EVERY == 0:
                tracemalloc.start()
                taken = allocated_bytes(index, digest, record)
                tracemalloc.stop()
                assert taken <= allocation_limit(index), f"{taken} bytes allocated for one record"
                tally.peak_bytes = max(tally.peak_bytes, taken - allocation_limit(index) + CONSTANT_BYTES)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we are looking for
            place = f"seed {seed} batch {number} record {i} world {index} asked {digest.hex()}"
            data = bytes((index, ASKED.index(digest))) + record
            tally.failures.append((f"{place}: {type(error).__name__}: {error}", data))
            break
    tally.rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return tally


def run(n_records: int, seed: int, workers: int) -> Tally:
    """Read that many records in batches, by worker processes where there are several."""
    whole, rest = divmod(n_records, BATCH)
    jobs = [(seed, i, BATCH) for i in range(whole)] + ([(seed, whole, rest)] if rest else [])
    total = Tally()
    if workers == 1:
        for job in jobs:
            total.add(run_batch(job))
        return total
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for part in pool.imap_unordered(run_batch, jobs):
            total.add(part)
            if total.failures:
                break
    return total


def main() -> int:
    """Run and print; 1 when a law broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2)
    args = parser.parse_args()
    began = time.monotonic()
    tally = run(args.records, args.seed, args.workers)
    seconds = time.monotonic() - began
    read = tally.outcomes.total()
    print(f"{read} hostile records, seed {args.seed}, {seconds:.0f} s, {read / seconds:.0f} records/s")
    for outcome, count in tally.outcomes.most_common():
        print(f"  {outcome:10} {count:9}")
    print(f"peak allocation {tally.peak_bytes} bytes beyond the block, resident {tally.rss_bytes >> 20} MiB")
    for text, data in tally.failures:
        path = Path(tempfile.gettempdir()) / f"kvstore-hostile-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        print(f"{text}\n  run_atheris.py record --replay {path}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())

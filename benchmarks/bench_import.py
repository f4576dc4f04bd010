"""What ``import kvstore`` plus plugin discovery costs over a bare interpreter.

Run: python benchmarks/bench_import.py [rounds]

Every round starts three interpreters by turns, so that a busy machine slows them alike.  Printed are
differences to the bare one of the same round: wall time and CPU time (user + system), which other
work on the machine disturbs least.  Budget: 150 ms.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

BARE = "pass"
CASES = {
    "import kvstore": "import kvstore",
    "import kvstore + discovery": ("import kvstore; from kvstore.plugins import Registry; Registry.discover().list()"),
}


def run(code: str) -> tuple[float, float]:
    """Return wall and CPU seconds of one interpreter from start to exit."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main(rounds: int) -> None:
    """Print a line per case."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    run(CASES["import kvstore + discovery"])  # byte code and file cache
    for _ in range(rounds):
        bare_wall_s, bare_cpu_s = run(BARE)
        for name, code in CASES.items():
            wall_s, cpu_s = run(code)
            costs[name].append((wall_s - bare_wall_s, cpu_s - bare_cpu_s))
    for name, pairs in costs.items():
        for unit, values in zip(("wall", "CPU"), zip(*pairs, strict=True), strict=True):
            median_ms, least_ms = statistics.median(values) * 1e3, min(values) * 1e3
            print(f"{name:28} {unit:4}  median {median_ms:6.1f} ms  min {least_ms:6.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)

"""L1 against np.copyto of the same blocks in the same run: put, get, acquire, and cost per block.

    python benchmarks/bench_l1.py [--mib 128] [--rounds 9]

Each measurement is the best of its rounds, and the rounds of all measurements take turns, so that
a noisy neighbour hits them alike.  Ratios are L1's speed over the speed of np.copyto into as many
rotating numpy arrays as L1 has warmed slots.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvstore.l1.cache import L1Cache
from kvstore.l1.lease import Lease
from kvstore.l1.policies.prefix_lru import PrefixLruPolicy
from kvstore.l1.pool import SlabPool
from kvstore.spec import BlockSpec

Array = npt.NDArray[np.uint8]

SPECS = {
    "64 KiB": BlockSpec(layers=4, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16"),
    "2 MiB": BlockSpec(layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16"),
}


def best_of(rounds: int, measurements: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Seconds of the best round of each measurement; the rounds take turns."""
    best = dict.fromkeys(measurements, float("inf"))
    for i in range(rounds):
        for name, run in measurements.items():
            begin = time.perf_counter()
            run(i)
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def with_parents(digests: list[bytes]) -> list[tuple[bytes, bytes | None]]:
    return list(zip(digests, [None, *digests[:-1]], strict=True))


class Bench:
    """One pool that is exactly full: every put evicts, into slots that were written before."""

    def __init__(self, spec: BlockSpec, total_bytes: int) -> None:
        self.spec = spec
        self.n_blocks = total_bytes // spec.nbytes
        stride = SlabPool(spec.nbytes, spec.nbytes * 2 + 8192).stride
        self.l1 = L1Cache(spec, self.n_blocks * stride, lambda _: PrefixLruPolicy())
        rng = np.random.default_rng(0)
        self.sources: list[Array] = [rng.integers(0, 256, spec.nbytes, np.uint8) for _ in range(self.n_blocks)]
        self.targets: list[Array] = [np.zeros(spec.nbytes, np.uint8) for _ in range(self.n_blocks)]
        self.torch_targets = [torch.from_numpy(t).view(spec.torch_dtype()).view(spec.shape) for t in self.targets]
        self.round = 0
        self.digests: list[bytes] = []
        self.prepare(1)
        self.put(0)  # warms every slot

    def fresh_digests(self) -> list[bytes]:
        self.round += 1
        return [self.round.to_bytes(16, "big") + i.to_bytes(16, "big") for i in range(self.n_blocks)]

    def memcpy(self, _: int) -> None:
        for target, source in zip(self.targets, self.sources, strict=True):
            np.copyto(target, source)

    def put(self, i: int) -> None:
        items = self.prepared[i]
        slots = self.l1.reserve(len(items))
        payload = self.l1.pool.payload
        for slot, source in zip(slots, self.sources, strict=True):
            np.copyto(payload(slot), source)
        self.l1.publish(items, slots)
        self.digests = [digest for digest, _ in items]

    def get(self, _: int) -> None:
        entries = self.l1.pin_leading(self.digests)
        payload = self.l1.pool.payload
        for entry, target in zip(entries, self.targets, strict=True):
            np.copyto(target, payload(entry.slot))
        self.l1.unpin(entries)

    def acquire(self, _: int) -> None:
        with Lease(self.l1, self.l1.pin_leading(self.digests)) as lease:
            for tensor, target in zip(lease.tensors, self.torch_targets, strict=True):
                target.copy_(tensor)

    def put_overhead(self, i: int) -> None:
        items = self.prepared[i]
        self.l1.publish(items, self.l1.reserve(len(items)))
        self.digests = [digest for digest, _ in items]

    def prepare(self, rounds: int) -> None:
        """Make the keys beforehand, as an engine does: hashing is not L1's cost."""
        self.prepared = [with_parents(self.fresh_digests()) for _ in range(rounds)]

    def pin_overhead(self, _: int) -> None:
        self.l1.unpin(self.l1.pin_leading(self.digests))

    def lease_overhead(self, _: int) -> None:
        with Lease(self.l1, self.l1.pin_leading(self.digests)) as lease:
            if len(lease.tensors) != self.n_blocks:
                raise SystemExit("blocks were evicted although the pool has room for all of them")

    def lookup(self, _: int) -> None:
        if self.l1.leading(self.digests) != self.n_blocks:
            raise SystemExit("blocks were evicted although the pool has room for all of them")


def report_copies(total_bytes: int, rounds: int) -> None:
    for name, spec in SPECS.items():
        bench = Bench(spec, total_bytes)
        bench.prepare(rounds)
        best = best_of(rounds, {w: getattr(bench, w) for w in ("memcpy", "put", "get", "acquire")})
        print(f"{name} blocks, {bench.n_blocks} of them; np.copyto {total_bytes / best['memcpy'] / 1e9:.2f} GB/s")
        for what in ("put", "get", "acquire"):
            print(f"  {what:8} {best['memcpy'] / best[what]:.2f} of np.copyto")
        bench.l1.close()


def report_overheads(rounds: int) -> None:
    spec = BlockSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="bfloat16")
    bench = Bench(spec, 4096 * spec.nbytes)
    bench.prepare(rounds)
    whats = ("put_overhead", "pin_overhead", "lease_overhead")
    best = best_of(rounds, {w: getattr(bench, w) for w in whats})
    lookup = best_of(rounds, {"leading": bench.lookup})
    print("without copying, 4,096 blocks a call, pool full:")
    print(f"  reserve + evict + publish {best['put_overhead'] / 4096 * 1e6:.2f} us a block")
    print(f"  pin_leading + unpin       {best['pin_overhead'] / 4096 * 1e6:.2f} us a block")
    print(f"  lease + tensors + release {best['lease_overhead'] / 4096 * 1e6:.2f} us a block")
    print(f"  leading                   {lookup['leading'] * 1e3:.2f} ms for all 4,096")
    bench.l1.close()


def report_first_touch(total_bytes: int) -> None:
    block_bytes = 2 << 20
    source = np.ones(block_bytes, np.uint8)

    def fill(pool: SlabPool) -> float:
        begin = time.perf_counter()
        for _ in range(pool.n_slots):
            np.copyto(pool.payload(pool.allocate() or 0), source)
        return pool.n_slots * block_bytes / (time.perf_counter() - begin) / 1e9

    print(f"first writes into a new pool of {total_bytes >> 20} MiB:")
    for populate in (False, True):
        begin = time.perf_counter()
        pool = SlabPool(block_bytes, total_bytes, populate=populate)
        opened = time.perf_counter() - begin
        print(f"  populate={populate!s:5} open {opened * 1e3:.1f} ms, then {fill(pool):.2f} GB/s")
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="bytes copied a round, in MiB")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)  # Tensor.copy_ against np.copyto: one thread each
    report_copies(args.mib << 20, args.rounds)
    report_overheads(args.rounds)
    report_first_touch(args.mib << 20)


if __name__ == "__main__":
    main()

"""Eight threads on one small L1: every byte that is read belongs to its digest."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.lease import Lease
from kvstore.l1.policies.s3fifo import S3FifoPolicy
from kvstore.l1.reservation import Reservation
from kvstore.spec import BlockSpec

N_THREADS = 8
N_BLOCKS = 24  # slots; a quarter of what the keys need
SECONDS = 1.5
SPEC = BlockSpec(layers=1, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")


class EngineError(Exception):
    """What a holder of blocks raises now and then."""


class Worker(threading.Thread):
    def __init__(self, seed: int, l1: L1Cache, keys: list[list[bytes]], contents: dict[bytes, bytes]) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.l1, self.keys, self.contents = l1, keys, contents
        self.held: list[torch.Tensor] = []  # views of dropped leases
        self.held_digests: list[bytes] = []
        self.n_calls = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        end = time.monotonic() + SECONDS
        calls: list[Callable[[list[bytes]], None]] = [
            self.get, self.get, self.put, self.put, self.lease, self.allocate, self.drop_lease, self.delete,
        ]  # fmt: skip
        try:
            while time.monotonic() < end:
                with contextlib.suppress(EngineError):
                    self.rng.choice(calls)(self.rng.choice(self.keys))
                self.n_calls += 1
            self.verify_held()
        except BaseException as e:  # noqa: BLE001 - handed to the test's thread
            self.error = e

    def fail_sometimes(self) -> None:
        if self.rng.random() < 0.01:
            raise EngineError

    def check(self, digest: bytes, data: bytes) -> None:
        assert data == self.contents[digest], f"wrong bytes for {digest.hex()[:8]}"

    def items(self, key: list[bytes], start: int = 0) -> list[tuple[bytes, bytes | None]]:
        return list(zip(key, [None, *key[:-1]], strict=True))[start:]

    def get(self, key: list[bytes]) -> None:
        entries = self.l1.pin_leading(key)
        try:
            for entry in entries:
                self.check(entry.digest, self.l1.pool.payload(entry.slot).tobytes())
            self.fail_sometimes()
            self.l1.touch(key)
        finally:
            self.l1.unpin(entries)

    def put(self, key: list[bytes]) -> None:
        start = self.l1.leading(key)
        slots = self.l1.reserve(len(key) - start)
        generation = self.l1.generation
        for slot, digest in zip(slots, key[start:], strict=False):
            np.copyto(self.l1.pool.payload(slot), np.frombuffer(self.contents[digest], np.uint8))
        pins = self.rng.randrange(2)
        entries: list[Entry] = self.l1.publish(
            self.items(key, start)[: len(slots)], slots, pins=pins, generation=generation
        )
        if pins:
            for entry in entries:
                self.check(entry.digest, self.l1.pool.payload(entry.slot).tobytes())
            self.l1.unpin(entries)

    def lease(self, key: list[bytes]) -> None:
        with Lease(self.l1, self.l1.pin_leading(key)) as lease:
            self.fail_sometimes()
            for digest, tensor in zip(key, lease.tensors, strict=False):
                self.check(digest, tensor.view(torch.uint8).numpy().tobytes())

    def drop_lease(self, key: list[bytes]) -> None:
        tensors = Lease(self.l1, self.l1.pin_leading(key)).tensors
        if tensors:
            i = self.rng.randrange(len(tensors))
            self.verify_held()
            self.held, self.held_digests = [tensors[i][0]], [key[i]]

    def verify_held(self) -> None:
        for tensor, digest in zip(self.held, self.held_digests, strict=True):
            self.check(digest, tensor.view(torch.uint8).numpy().tobytes())

    def allocate(self, key: list[bytes]) -> None:
        with Reservation(self.l1, self.items(key), self.l1.reserve(len(key))) as reservation:
            for digest, tensor in zip(key, reservation.tensors, strict=False):
                np.copyto(tensor.view(torch.uint8).view(-1).numpy(), np.frombuffer(self.contents[digest], np.uint8))
            self.fail_sometimes()
            reservation.commit(self.rng.randint(0, reservation.blocks))

    def delete(self, key: list[bytes]) -> None:
        if self.rng.random() < 0.05:
            self.l1.clear()
        else:
            self.l1.delete(self.rng.sample(key, 2))


def test_eight_threads_read_nothing_but_what_was_put(
    chain: Callable[[str, int], list[bytes]], content: Callable[[bytes, int], np.ndarray]
) -> None:
    l1 = L1Cache(SPEC, N_BLOCKS * 8192, S3FifoPolicy)
    keys = [chain(str(i), 6) for i in range(16)]
    contents = {digest: content(digest, SPEC.nbytes).tobytes() for key in keys for digest in key}
    workers = [Worker(seed, l1, keys, contents) for seed in range(N_THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.error for w in workers] == [None] * N_THREADS

    for worker in workers:
        worker.held.clear()
    counters = l1.counters
    assert counters.pinned_blocks == 0
    assert counters.evictions > 100
    assert counters.leases_dropped > 10
    assert counters.resident_blocks + l1.pool.n_free == N_BLOCKS
    assert len(l1._index.policy) == counters.resident_blocks
    assert min(w.n_calls for w in workers) > 20
    assert l1.counters.orphaned_bytes == sum(
        SPEC.nbytes
        for e in l1._index.entries.values()
        if e.parent in l1._index.lineage._left and e.parent not in l1._index.entries
    )
    l1.close()

"""S3 backend beside tuned boto3: bytes per second of client CPU, and what 30 ms of latency cost.

Run it with ``python benchmarks/bench_s3.py [--rounds N] [--quick]``.  The server is
``raw_s3_server.py`` in a process of its own, so that only the client's CPU time counts.  Ours are
whole puts and gets of the backend with every record's checksums made and checked; boto3's are bare
``put_object`` and ``get_object`` of objects of the same size as a block, with checksums switched
off, payload signing off and the body read into a buffer.  Every figure is the best of several
interleaved rounds; on a shared machine trust the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import http.client
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3.session  # type: ignore[import-untyped]
import numpy as np
import xxhash
from botocore.config import Config  # type: ignore[import-untyped]
from kvstore_s3.backend import S3Backend
from kvstore_s3.options import S3Options

from kvstore.backend import BackendContext, PutHint, PutItem, RecordInfo
from kvstore.objects.naming import key_of
from kvstore.types import Call, Presence, PutStatus, ReadStatus, Run

TOTAL_BYTES = 256 << 20
SEGMENT_BYTES = 256 << 10
CONNECTIONS = 4
LATENCY_MS = 30
NAMESPACE = bytes(16)
PROMPT_BLOCKS = 2048  # 32,768 tokens in blocks of 16
PROMPT_BLOCK_BYTES = 64 << 10
PROMPT_CONNECTIONS = 16
LINKS_MBIT = (1000, 0)
KEYS = {"access_key_id": "bench", "secret_access_key": "bench"}


@dataclass
class Blocks:
    """A prompt's worth of records of one size."""

    payload_bytes: int
    count: int
    heads: list[bytes] = field(default_factory=list)
    payloads: list[np.ndarray] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)

    @classmethod
    def make(cls, payload_bytes: int, count: int) -> Blocks:
        made = cls(payload_bytes, count)
        noise = np.random.default_rng(0).integers(0, 256, (count, payload_bytes), np.uint8)
        segments = -(-payload_bytes // SEGMENT_BYTES)
        for i, row in enumerate(noise):
            made.heads.append(bytes(192 + 16 * segments))
            made.payloads.append(row)
            made.names.append(bytes(17) + hashlib.blake2b(i.to_bytes(8, "little"), digest_size=32).digest())
        return made

    @property
    def nbytes(self) -> int:
        return self.payload_bytes * self.count

    def items(self) -> list[PutItem]:
        return [
            PutItem(name, [head, payload.data], PutHint(self.names[i - 1] if i else b"", i), len(head))
            for i, (name, head, payload) in enumerate(zip(self.names, self.heads, self.payloads, strict=True))
        ]


@contextlib.contextmanager
def raw_server(*arguments: str) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("raw_s3_server.py")), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def opened(url: str, blocks: Blocks, *, pack: int, connections: int = CONNECTIONS) -> S3Backend:
    backend = S3Backend()
    options = S3Options(bucket="bench", endpoint_url=url, pack=pack, connections=connections, **KEYS)  # type: ignore[arg-type]
    backend.open(BackendContext("bench", options, block_bytes=blocks.payload_bytes))
    return backend


def checksum(payload: np.ndarray) -> None:
    for start in range(0, len(payload), SEGMENT_BYTES):
        xxhash.xxh3_64_intdigest(payload[start : start + SEGMENT_BYTES].data)


@dataclass(frozen=True)
class Cost:
    """What some work took."""

    wall_s: float
    cpu_s: float


def measured(work: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def long_call(blocks: Blocks, seconds: float = 120.0) -> Call:
    call = Call.within(seconds)
    call.run = Run(0, blocks.names)
    return call


# -- ours


def put_ours(backend: S3Backend, blocks: Blocks, count: int | None = None) -> Cost:
    items = blocks.items()[:count]
    each = backend.batch_shape().blocks

    def work() -> None:
        for start in range(0, len(items), CONNECTIONS * each):
            some = items[start : start + CONNECTIONS * each]
            for item in some:
                checksum(np.frombuffer(item.buffers[1], np.uint8))
            if not set(backend.put_many(some, Call.within(60))) <= {PutStatus.STORED, PutStatus.EXISTS}:
                raise SystemExit("a put was refused")

    return measured(work)


def get_ours(backend: S3Backend, blocks: Blocks, out: np.ndarray) -> Cost:
    """Read the prompt straight into its place, each record checked where it lies."""
    heads = [bytearray(len(head)) for head in blocks.heads]

    def place(i: int, info: RecordInfo) -> Sequence[memoryview]:
        del info
        return [memoryview(heads[i]), out[i].data]

    def done(i: int) -> None:
        checksum(out[i])

    def work() -> None:
        if set(backend.read_many(blocks.names, place, done, long_call(blocks))) != {ReadStatus.OK}:
            raise SystemExit("a record is missing")

    return measured(work)


# -- boto3


def boto_client(url: str) -> Any:
    config = Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=CONNECTIONS,
        retries={"total_max_attempts": 1, "mode": "standard"},
    )
    session = boto3.session.Session(aws_access_key_id="bench", aws_secret_access_key="bench")  # noqa: S106
    return session.client("s3", endpoint_url=url, region_name="us-east-1", config=config)


def strided(work: Callable[[int], None], count: int) -> None:
    """Do ``count`` things in as many threads as there are connections."""

    def share(first: int) -> None:
        for i in range(first, count, CONNECTIONS):
            work(i)

    threads = [threading.Thread(target=share, args=(first,)) for first in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def put_boto(client: Any, blocks: Blocks) -> Cost:
    bodies = [head + payload.tobytes() for head, payload in zip(blocks.heads, blocks.payloads, strict=True)]
    return measured(
        lambda: strided(lambda i: client.put_object(Bucket="bench", Key=f"boto/{i}", Body=bodies[i]), blocks.count)
    )


def get_boto(client: Any, blocks: Blocks) -> Cost:
    buffers = [bytearray(blocks.payload_bytes + len(blocks.heads[0])) for _ in range(CONNECTIONS)]

    def get(i: int) -> None:
        view = memoryview(buffers[i % CONNECTIONS])
        body = client.get_object(Bucket="bench", Key=f"boto/{i}")["Body"]
        while view:
            view = view[body.readinto(view) :]

    return measured(lambda: strided(get, blocks.count))


# -- the two tables


def bench_size(payload_bytes: int, rounds: int, total_bytes: int) -> None:
    blocks = Blocks.make(payload_bytes, total_bytes // payload_bytes)
    out = np.zeros((blocks.count, payload_bytes), np.uint8)
    costs: dict[str, list[Cost]] = {}

    def note(what: str, cost: Cost) -> None:
        costs.setdefault(what, []).append(cost)

    for _ in range(rounds):
        for pack in (16, 1):
            with raw_server() as url:
                backend = opened(url, blocks, pack=pack)
                note(f"put, pack {pack}", put_ours(backend, blocks))
                out[:] = 0
                note(f"get, pack {pack}", get_ours(backend, blocks, out))
                if not all(np.array_equal(a, b) for a, b in zip(out, blocks.payloads, strict=True)):
                    raise SystemExit("wrong bytes")
                backend.close()
        with raw_server() as url:
            client = boto_client(url)
            note("put, boto3", put_boto(client, blocks))
            note("get, boto3", get_boto(client, blocks))
            client.close()
    print(f"\n{payload_bytes >> 10} KiB blocks, {blocks.count} of them, {CONNECTIONS} connections")
    print(f"{'':16} {'GB per CPU s':>13} {'x boto3':>8} {'GB/s wall':>10} {'us CPU a block':>15}")
    best = {what: min(cost.cpu_s for cost in some) for what, some in costs.items()}
    wall = {what: min(cost.wall_s for cost in some) for what, some in costs.items()}
    for what, cpu_s in best.items():
        verb = what.partition(",")[0]
        print(
            f"{what:16} {blocks.nbytes / cpu_s / 1e9:13.2f} {best[f'{verb}, boto3'] / cpu_s:8.1f}"
            f" {blocks.nbytes / wall[what] / 1e9:10.2f} {cpu_s / blocks.count * 1e6:15.0f}"
        )


def bench_latency(link_mbit: int, connections: int) -> None:
    """A cold process looks a whole prompt up and restores it, far from the bucket."""
    blocks = Blocks.make(PROMPT_BLOCK_BYTES, PROMPT_BLOCKS)
    out = np.zeros((blocks.count, blocks.payload_bytes), np.uint8)
    link = f"a link of {link_mbit} Mbit/s" if link_mbit else "no limit on the link"
    print(f"\n{PROMPT_BLOCKS} blocks of {PROMPT_BLOCK_BYTES >> 10} KiB, {LATENCY_MS} ms added to every request,")
    print(f"{connections} connections, {link}")
    with raw_server("--latency-ms", str(LATENCY_MS), "--link-mbit", str(link_mbit)) as url:
        writer = opened(url, blocks, pack=16, connections=connections)
        writer.epoch(NAMESPACE)
        for stored in (PROMPT_BLOCKS * 2 // 3, PROMPT_BLOCKS):
            put_ours(writer, blocks, stored)
            reader = opened(url, blocks, pack=16, connections=connections)
            rounds_at(url)
            cost = measured(functools.partial(look_up, reader, blocks, stored))
            requests, rounds = rounds_at(url)
            reader.close()
            print(
                f"cold lookup, {stored} stored: {rounds} round trips, {requests} requests, {cost.wall_s * 1e3:.0f} ms"
            )
        ours = min(get_ours(writer, blocks, out).wall_s for _ in range(3))
        paths = [f"/bench/kvstore/{key_of(name)}" for name in blocks.names[15::16]]
        bare = min(measured(lambda: bare_gets(url, paths, connections)).wall_s for _ in range(3))
        writer.close()
    print(f"restore: {ours:.2f} s = {blocks.nbytes / ours / 1e6:.0f} MB/s;", end=" ")
    print(f"a bare loop of the same {len(paths)} GETs: {bare:.2f} s; ratio {bare / ours:.2f}")


def look_up(backend: S3Backend, blocks: Blocks, stored: int) -> None:
    """What a cache does for one prompt: the epoch, then the longest stored prefix."""
    backend.epoch(NAMESPACE)
    call = long_call(blocks)
    call.leading_only = True
    found = backend.exists_many(blocks.names, call)
    if found != [Presence.PRESENT] * stored + [Presence.ABSENT] * (blocks.count - stored):
        raise SystemExit("the lookup is wrong")


def rounds_at(url: str) -> tuple[int, int]:
    """Requests that the server has seen since it was asked last, and the rounds they came in."""
    with urllib.request.urlopen(f"{url}/-/rounds") as answer:  # noqa: S310 - loopback
        requests, rounds = answer.read().split()
    return int(requests), int(rounds)


def bare_gets(url: str, paths: Sequence[str], connections: int) -> None:
    """Fetch the objects over as many kept connections, and do nothing else."""
    left = iter(paths)
    taking = threading.Lock()
    address = url.removeprefix("http://")

    def fetch() -> None:
        client = http.client.HTTPConnection(address)
        buffer = memoryview(bytearray(20 * PROMPT_BLOCK_BYTES))
        while True:
            with taking:
                path = next(left, None)
            if path is None:
                client.close()
                return
            client.request("GET", path)
            answer = client.getresponse()
            at = 0
            while got := answer.readinto(buffer[at:]):
                at += got

    threads = [threading.Thread(target=fetch) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a fourth of the bytes")
    arguments = parser.parse_args()
    total = TOTAL_BYTES // 4 if arguments.quick else TOTAL_BYTES
    for payload_bytes in (2 << 20, 64 << 10):
        bench_size(payload_bytes, arguments.rounds, total)
    for link_mbit in LINKS_MBIT:
        bench_latency(link_mbit, PROMPT_CONNECTIONS)


if __name__ == "__main__":
    main()

"""A18: a hole ends a prefix and costs nothing else; independent reads deliver all the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvstore.types import BlockStatus
from tests.faults.media import server_of
from tests.faults.process import Forge, Shim
from tests.faults.s3_faults import Fault as ServerFault
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, chain, noise, same, target, untouched

N, HOLE = 10, 3
KEY = chain(N, seed=18)
BLOCKS = noise(SMALL, range(N))
REASONS = {
    "deleted": {BlockStatus.ABSENT, BlockStatus.CORRUPT},  # a slot of a segment can only be overwritten
    "corrupt": {BlockStatus.CORRUPT},
    "io-error": {BlockStatus.UNAVAILABLE},
    "timeout": {BlockStatus.TIMEOUT, BlockStatus.UNAVAILABLE},
}
S3_FAULTS = {"io-error": "error500", "timeout": "hang"}


@contextmanager
def damaged(store: Store, how: str) -> Iterator[None]:
    """Block 3 cannot be read as long as this lasts."""
    place = store.at(KEY, HOLE)
    if how in S3_FAULTS:
        server_of(store).inject(ServerFault(S3_FAULTS[how], only=str(place)))
        yield
        server_of(store).inject()
        return
    if how == "deleted":
        store.remove(place)
    else:
        store.write(place, store.read(place)[:-1] + b"\x5a")
    yield


def assert_hole(cache: WatchedCache, how: str) -> None:
    """Independent and prefix reads, in one call and one by one, say the same."""
    out = target(SMALL, N)
    statuses = cache.get_each(KEY, out)
    assert statuses[HOLE] in REASONS[how], statuses
    assert [s for i, s in enumerate(statuses) if i != HOLE] == [BlockStatus.DELIVERED] * (N - 1)
    assert untouched(out[HOLE])
    others = [i for i in range(N) if i != HOLE]
    assert same(out[others], BLOCKS[others])
    out = target(SMALL, N)
    assert cache.get(KEY, out) == HOLE
    assert same(out[:HOLE], BLOCKS[:HOLE])
    assert untouched(out[HOLE:])
    if how in {"deleted", "corrupt"}:  # the failure is known now; a passing one is not an absence
        assert cache.lookup(KEY).blocks <= HOLE
    singles = [cache.fetch(KEY[i : i + 1]) is not None for i in range(N)]
    assert singles == [i != HOLE for i in range(N)]


@pytest.mark.parametrize("how", ["deleted", "corrupt"])
@over("LNTS")
def test_a_hole_ends_the_prefix_and_is_filled_by_a_put(store: Store, how: str) -> None:
    with store.open(**store.alone()) as cache:
        cache.store(KEY, BLOCKS)
        with damaged(store, how):
            assert_hole(cache, how)
        cache.store(KEY[HOLE : HOLE + 1], BLOCKS[HOLE : HOLE + 1])
        out = target(SMALL, N)
        assert cache.get(KEY, out) == N
        assert same(out, BLOCKS)


@pytest.mark.parametrize("how", ["io-error", "timeout"])
@over("S")
def test_a_passing_failure_is_a_hole_that_closes_by_itself(store: Store, how: str) -> None:
    with store.open(**store.alone(), attempts=1, read_timeout=0.3, deadline=1.0) as cache:
        cache.store(KEY, BLOCKS)
        with damaged(store, how):
            assert_hole(cache, how)
        out = target(SMALL, N)
        assert cache.get(KEY, out) == N
        assert same(out, BLOCKS)
        assert cache.tier(TIER).counters.corrupt == 0


READ_ERROR = """
shim = FaultSwitch(Path(ARGS[0]))
key, blocks = chain(10, seed=18), noise(SMALL, range(10))
with STORE.open() as cache:
    cache.store(key, blocks)
    shim.set(Fault.EIO_READ, after=3, every=1_000_000)  # the fourth read fails
    out = target(SMALL, 10)
    statuses = [status.value for status in cache.get_each(key, out)]
    shim.off()
    for i, status in enumerate(statuses):
        assert same(out[i], blocks[i]) if status == "delivered" else untouched(out[i]), i
    out = target(SMALL, 10)
    assert cache.get(key, out) == 10 and same(out, blocks)
print(json.dumps(statuses))
"""


@over("N")
def test_one_failed_read_costs_one_block(store: Store, forge: Forge, shim: Shim) -> None:
    segment = shim._replace(prefix=store.root / "seg-0000")
    statuses = forge.work(READ_ERROR, store, shim.control, shim=segment)
    assert sorted(statuses) == ["delivered"] * 9 + ["unavailable"]


WRITE_ERROR = """
shim = FaultSwitch(Path(ARGS[0]))
key, blocks = chain(10, seed=18), noise(LARGE, range(10))  # so large that each is a write of its own
with STORE.open(spec=LARGE) as cache:
    cache.store(unrelated(1), noise(LARGE, [1]))
    shim.set(Fault.EIO_WRITE, after=3, every=1_000_000)
    cache.store(key, blocks)
    shim.off()
    before = cache.tier(TIER).counters
    there = [presence is Presence.PRESENT for presence in cache.contains_each(key)]
    cache.store(key, blocks)
    out = target(LARGE, 10)
    assert cache.get(key, out) == 10 and same(out, blocks)
print(json.dumps(dict(there=there, stored=before.stored - 1, refused=before.refused_medium)))
"""


@over("N")
def test_one_failed_write_costs_one_block(store: Store, forge: Forge, shim: Shim) -> None:
    segment = shim._replace(prefix=store.root / "seg-0000")
    report = forge.work(WRITE_ERROR, store, shim.control, shim=segment)
    assert (report["stored"], report["refused"]) == (9, 1)
    assert report["there"].count(True) == 9


@over("S")
def test_one_refused_object_costs_one_block(store: Store) -> None:
    with store.open(pack=1, attempts=1) as cache:
        bad = KEY[HOLE].hex()
        server_of(store).inject(ServerFault("error500", methods=("PUT",), only=bad))
        cache.store(KEY, BLOCKS)
        server_of(store).inject()
        counters = cache.tier(TIER).counters
        assert (counters.stored, counters.refused_medium) == (N - 1, 1)
        assert cache.get(KEY, target(SMALL, N)) == HOLE
        cache.store(KEY, BLOCKS)
        out = target(SMALL, N)
        assert cache.get(KEY, out) == N
        assert same(out, BLOCKS)


@over("TS")
def test_a_corrupt_record_in_a_pack_costs_its_neighbours_nothing(store: Store) -> None:
    with store.open() as cache:
        cache.store(KEY, BLOCKS)
        assert len(store.places()) < N
        pack = next(place for place in store.places() if KEY[HOLE] in store.read(place))
        value = store.read(pack)
        at = value.index(bytes(BLOCKS[HOLE].view(torch.uint8).view(-1)[:64].tolist()))
        store.write(pack, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
        out = target(SMALL, N)
        statuses = cache.get_each(KEY, out)
        assert statuses[HOLE] is BlockStatus.CORRUPT
        assert [s for i, s in enumerate(statuses) if i != HOLE] == [BlockStatus.DELIVERED] * (N - 1)
        assert untouched(out[HOLE])
        out = target(SMALL, N)
        assert cache.get(KEY, out) <= HOLE
        assert cache.lookup(KEY).blocks <= HOLE
        cache.store(KEY, BLOCKS)
        out = target(SMALL, N)
        assert cache.get(KEY, out) == N
        assert same(out, BLOCKS)

"""Several processes on one store: what one puts the others have, and nothing is kept or counted twice."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stateful.media import BUCKET, FILES, NEEDS_A_SECOND, SHARED, Place, taken_bytes
from tests.stateful.peer import SPEC, Peer
from tests.support_s3 import make_bucket, moto_url

__all__ = ["moto_url"]

MIB = 1 << 20
BLOCKS = 6
CAPACITY = 64 * MIB
TREE_SPACE = 1.02 + 4 * 0.02  # a tree has no locks: each of the writers may add this part before it looks again
OVERHEAD = 1.2  # of heads, rounding up and index pages; a second copy of one chain would be a third more
SOON_S = 10.0  # longest wait for what a medium is allowed to remember for about a second

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, moto_url: str) -> Place:
    make_bucket(moto_url, BUCKET)
    return Place(tmp_path_factory.mktemp("sharing"), moto_url)


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    with Peer() as a, Peer() as b, Peer() as c, Peer() as d:
        yield [a, b, c, d]


@pytest.fixture(scope="module")
def onlooker(place: Place) -> Iterator[Peer]:
    """A process that sees all stores on a read-only mount."""
    mounts = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    wrapper = ["unshare", "-rm", "sh", "-c", mounts, "sh", str(place.root)]
    try:
        subprocess.run([*wrapper, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"cannot change mounts: {e}")
    with Peer(*wrapper) as peer:
        yield peer


@pytest.fixture(params=SHARED)
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tier(place: Place, medium: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A store of its own for each test."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return place.tier(medium, name, capacity=CAPACITY)


@pytest.fixture
def opened(peers: list[Peer], tier: dict[str, Any]) -> Iterator[list[Peer]]:
    """Every process has the store open."""
    assert [peer.ask("open", tier=tier) for peer in peers] == ["ok"] * len(peers)
    yield peers
    for peer in peers:
        peer.ask("close")


def soon(medium: str, ask: Callable[[], object], expected: object) -> object:
    """The answer; media that may remember an old one are asked again for some seconds."""
    end = time.monotonic() + SOON_S
    answer = ask()
    while answer != expected and medium in NEEDS_A_SECOND and time.monotonic() < end:
        time.sleep(0.02)
        answer = ask()
    return answer


def nothing_was_wrong(peers: list[Peer]) -> None:
    for peer in peers:
        stats = peer.ask("stats")
        assert [stats[name] for name in ("corrupt", "key_mismatch", "io_errors", "timeouts")] == [0, 0, 0, 0]


def test_a_put_of_one_process_is_a_hit_of_the_others_at_once(opened: list[Peer]) -> None:
    writer, *readers = opened
    assert writer.ask("put", seeds=[1], blocks=BLOCKS) == [BLOCKS]
    assert [reader.ask("lookup", seed=1, blocks=BLOCKS) for reader in readers] == [BLOCKS] * 3
    assert [reader.ask("get", seed=1, blocks=BLOCKS) for reader in readers] == [BLOCKS] * 3
    nothing_was_wrong(opened)


def test_a_miss_is_a_hit_once_another_process_has_put_it(opened: list[Peer], medium: str) -> None:
    writer, reader, *_ = opened
    assert reader.ask("lookup", seed=1, blocks=BLOCKS) == 0
    assert reader.ask("get", seed=1, blocks=BLOCKS) == 0
    writer.ask("put", seeds=[1], blocks=BLOCKS)
    assert soon(medium, lambda: reader.ask("lookup", seed=1, blocks=BLOCKS), BLOCKS) == BLOCKS
    assert soon(medium, lambda: reader.ask("get", seed=1, blocks=BLOCKS), BLOCKS) == BLOCKS


def test_a_chain_grows_by_what_each_process_adds(opened: list[Peer], medium: str) -> None:
    one, two, *_ = opened
    one.ask("put", seeds=[1], blocks=BLOCKS)
    two.ask("put", seeds=[1], blocks=3 * BLOCKS)
    assert soon(medium, lambda: one.ask("get", seed=1, blocks=3 * BLOCKS), 3 * BLOCKS) == 3 * BLOCKS
    nothing_was_wrong(opened)


def test_a_clear_of_one_process_is_seen_by_the_others(opened: list[Peer], medium: str) -> None:
    one, two, *_ = opened
    one.ask("put", seeds=[1], blocks=BLOCKS)
    assert two.ask("get", seed=1, blocks=BLOCKS) == BLOCKS
    one.ask("clear")
    assert one.ask("get", seed=1, blocks=BLOCKS) == 0
    assert soon(medium, lambda: two.ask("get", seed=1, blocks=BLOCKS), 0) == 0
    two.ask("put", seeds=[2], blocks=BLOCKS)
    assert soon(medium, lambda: one.ask("get", seed=2, blocks=BLOCKS), BLOCKS) == BLOCKS
    assert one.ask("lookup", seed=1, blocks=BLOCKS) == 0


def test_one_key_put_by_four_processes_is_stored_once(opened: list[Peer], medium: str) -> None:
    for peer in opened:
        peer.tell("put", seeds=[1, 2, 3], blocks=BLOCKS)
    assert [peer.answer() for peer in opened] == [[BLOCKS] * 3] * 4
    for peer in opened:
        assert peer.ask("get", seed=3, blocks=BLOCKS) == BLOCKS
        if medium in FILES:
            stats = peer.ask("stats")
            assert stats["records"] in {0, 3 * BLOCKS}  # 0: the medium counts no records, only bytes
            raw_bytes = 3 * BLOCKS * SPEC.nbytes
            assert raw_bytes <= stats["payload_bytes"] <= OVERHEAD * raw_bytes


@pytest.mark.parametrize("medium", FILES, indirect=True)
def test_writers_together_stay_within_one_capacity(opened: list[Peer], medium: str, tier: dict[str, Any]) -> None:
    folder = Path(tier["path"])
    chains = CAPACITY // (BLOCKS * SPEC.nbytes) // 2
    for number, peer in enumerate(opened):  # together twice the capacity
        peer.tell("put", seeds=list(range(100 * number, 100 * number + chains)), blocks=BLOCKS)
    most = 0
    while not all(peer.answered() for peer in opened):
        most = max(most, taken_bytes(folder))
    accepted = [sum(peer.answer()) for peer in opened]
    assert accepted == [chains * BLOCKS] * 4
    stats = [peer.ask("stats") for peer in opened]
    assert all(one["payload_bytes"] <= CAPACITY for one in stats)
    assert max(one["payload_bytes"] for one in stats) >= CAPACITY // 2
    assert most <= {"lmdb": 1.25 * CAPACITY + MIB, "segments": 1.02 * CAPACITY, "tree": TREE_SPACE * CAPACITY}[medium]
    newest = [peer.ask("get", seed=100 * number + chains - 1, blocks=BLOCKS) for number, peer in enumerate(opened)]
    assert newest.count(BLOCKS) >= 3
    assert -1 not in newest
    nothing_was_wrong(opened)


@pytest.mark.parametrize("medium", FILES, indirect=True)
def test_a_reader_on_a_read_only_mount_is_served(onlooker: Peer, peers: list[Peer], tier: dict[str, Any]) -> None:
    writer = peers[0]
    writer.ask("open", tier=tier)
    writer.ask("put", seeds=[1], blocks=BLOCKS)
    onlooker.ask("open", tier=tier)
    assert onlooker.ask("lookup", seed=1, blocks=BLOCKS) == BLOCKS
    assert onlooker.ask("get", seed=1, blocks=BLOCKS) == BLOCKS
    onlooker.ask("put", seeds=[2], blocks=BLOCKS)  # accepted or not: it cannot be stored
    assert onlooker.ask("lookup", seed=2, blocks=BLOCKS) == 0
    writer.ask("put", seeds=[3], blocks=BLOCKS)
    assert onlooker.ask("get", seed=3, blocks=BLOCKS) == BLOCKS
    onlooker.ask("close")
    writer.ask("close")

"""For each planted cause of a miss, ``explain`` names that one and no other, and changes nothing by asking."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import BlockReport, Cause, KVCache, KVCacheKey, Namespace, TierReport
from tests.faults.media import server_of
from tests.faults.s3_faults import Fault
from tests.faults.store import TIER, Store, over
from tests.support_faults import LARGE, NAMESPACE, SMALL, WatchedCache, chain, noise, unrelated


def cells(reports: Sequence[BlockReport], tier: str = TIER) -> list[TierReport]:
    """What one tier says of each block; each report has exactly one cell of it."""
    for report in reports:
        assert [cell.tier for cell in report.tiers].count(tier) == 1
    return [next(cell for cell in report.tiers if cell.tier == tier) for report in reports]


def only(cache: WatchedCache, key: KVCacheKey, cause: Cause, tier: str = TIER) -> TierReport:
    """The one cause that a tier names for every block of a key."""
    found = cells(cache.explain(key), tier)
    assert {cell.cause for cell in found} == {cause}, found
    assert all(cell.detail for cell in found)
    return found[0]


def stored(cache: WatchedCache, key: KVCacheKey, first_id: int = 0) -> KVCacheKey:
    cache.store(key, noise(cache.spec, range(first_id, first_id + len(key))))
    return key


def recent(at: float | None) -> bool:
    return at is not None and time.time() - 120 < at <= time.time()


@over("LNTS")
def test_a_stored_block_is_present_and_one_never_put_is_not_stored(store: Store) -> None:
    with store.open() as cache:
        key = stored(cache, chain(6))
        reports = cache.explain(key)
        assert only(cache, key, Cause.PRESENT).detail == "its record was read and verified"
        assert {cell.cause for cell in cells(reports, "l1")} == {Cause.L1_DISABLED}
        assert [(r.index, r.digest, r.present, r.reachable) for r in reports] == [
            (i, key[i], True, True) for i in range(6)
        ]
        other = chain(6, seed=1)
        only(cache, other, Cause.NOT_STORED)
        assert [(r.present, r.reachable) for r in cache.explain(other)] == [(False, False)] * 6


@over("LNT")
def test_an_evicted_block_is_evicted(store: Store) -> None:
    with store.open(capacity="4MiB", **store.alone()) as cache:
        for i in range(200):
            stored(cache, unrelated(i), i)
        assert cache.tier(TIER).counters.evicted > 50
        cell = only(cache, unrelated(0), Cause.EVICTED)
        assert recent(cell.at)
        assert "4MiB" in cell.detail
        only(cache, unrelated(199), Cause.PRESENT)


@over("LNT")
def test_what_happens_to_another_namespace_is_not_told_of_this_one(store: Store) -> None:
    """Evictions are told of all records; equal tokens have equal digests in every namespace."""
    other = replace(NAMESPACE, revision="r2")
    with store.open(capacity="4MiB", **store.alone()) as cache:
        stored(cache, unrelated(1000))
        with store.open(capacity="4MiB", namespace=other, **store.alone()) as neighbour:
            stored(neighbour, unrelated(0))
            for i in range(1, 200):
                stored(cache, unrelated(i), i)
            assert neighbour.fetch(unrelated(0)) is None
        only(cache, unrelated(0), Cause.NOT_STORED)
        only(cache, unrelated(1), Cause.EVICTED)


@over("LNTS")
def test_a_deleted_block_is_deleted_and_what_follows_it_is_behind_a_hole(store: Store) -> None:
    with store.open(**store.alone()) as cache:
        key = stored(cache, chain(6))
        assert cache.delete(key[2:3]) == 1
        reports = cache.explain(key)
        causes = [cell.cause for cell in cells(reports)]
        assert causes == [Cause.PRESENT] * 2 + [Cause.DELETED] + [Cause.BEHIND_A_HOLE] * 3
        assert recent(cells(reports)[2].at)
        assert "block 2 before it is missing" in cells(reports)[3].detail
        assert [r.reachable for r in reports] == [True] * 2 + [False] * 4
        assert [r.present for r in reports] == [True] * 2 + [False] + [True] * 3
        stored(cache, key)
        only(cache, key, Cause.PRESENT)


@over("LNTS")
def test_a_cleared_namespace_is_cleared_whoever_did_it(store: Store) -> None:
    with store.open() as cache, store.open() as other:
        key = stored(cache, chain(4))
        cache.clear()
        assert "by this process" in only(cache, key, Cause.CLEARED).detail
        stored(cache, key)
        only(cache, key, Cause.PRESENT)
        other.clear()
        deadline = time.monotonic() + 10  # a bucket's epoch may be a second old
        while cells(cache.explain(key))[0].cause is not Cause.CLEARED and time.monotonic() < deadline:
            time.sleep(0.05)
        cell = only(cache, key, Cause.CLEARED)
        assert "by another cache or process" in cell.detail
        assert recent(cell.at)


@over("LNTS")
def test_what_found_the_queue_full_says_so(store: Store) -> None:
    with store.open(l1="4MiB", queue=4 * SMALL.nbytes) as cache:
        key = chain(12)
        assert cache.put(key, noise(SMALL, range(12))) == 12
        cache.flush(30)
        only(cache, key[:4], Cause.PRESENT)
        assert "128KiB" in only(cache, key[4:], Cause.QUEUE_FULL).detail
        assert {cell.cause for cell in cells(cache.explain(key), "l1")} == {Cause.PRESENT}


@over("LT")
def test_a_block_larger_than_the_capacity_is_refused(store: Store) -> None:
    with store.open(spec=LARGE, capacity="1MiB") as cache:
        key = KVCacheKey.from_tokens(range(16), block_tokens=16)
        stored(cache, key)
        assert cache.tier(TIER).counters.refused_medium == 1
        cell = only(cache, key, Cause.REFUSED)
        assert recent(cell.at)
        assert "capacity" in cell.detail


@over("S")
def test_a_write_that_the_server_forbids_is_refused(store: Store) -> None:
    with store.open() as cache:
        stored(cache, unrelated(0))
        with server_of(store).faulty(Fault("forbid", methods=("PUT",))):
            stored(cache, chain(2))
        assert "may not write" in only(cache, chain(2), Cause.REFUSED).detail


@over("LNTS")
def test_a_damaged_record_is_corrupt_before_and_after_it_is_dropped(store: Store) -> None:
    with store.open(**store.alone()) as cache:
        key = stored(cache, unrelated(0))
        place = store.at(key)
        value = bytearray(store.read(place))
        value[store.head_bytes(bytes(value)) + 1000] ^= 1
        store.write(place, bytes(value))
        before = cache.stats()
        assert only(cache, key, Cause.CORRUPT).at is None
        assert "(checksum)" in only(cache, key, Cause.CORRUPT).detail  # it is still there
        after = cache.stats()
        assert after.tiers[0].counters == before.tiers[0].counters
        assert after.cache == before.cache
        assert cache.fetch(key) is None
        cell = only(cache, key, Cause.CORRUPT)
        assert recent(cell.at)
        assert "was dropped" in cell.detail
        stored(cache, key)
        only(cache, key, Cause.PRESENT)


@over("LNTS")
def test_records_under_each_others_names_are_mismatches(store: Store) -> None:
    with store.open(**store.alone()) as cache:
        for i in range(2):
            stored(cache, unrelated(i), i)
        store.swap(store.at(unrelated(0)), store.at(unrelated(1)))
        only(cache, unrelated(0), Cause.MISMATCH)
        assert cache.fetch(unrelated(0)) is None
        assert recent(only(cache, unrelated(0), Cause.MISMATCH).at)


@over("LNTS")
def test_a_record_made_without_the_key_is_unauthenticated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORD_KEY", "1" * 64)
    with store.open(**store.alone()) as cache:
        key = stored(cache, unrelated(0))
    with store.open(sections={"defaults": {"record_keys": ["env:RECORD_KEY"]}}, **store.alone()) as cache:
        assert "record_keys" in only(cache, key, Cause.UNAUTHENTICATED).detail
        assert cache.fetch(key) is None
        assert recent(only(cache, key, Cause.UNAUTHENTICATED).at)
        stored(cache, key)
        only(cache, key, Cause.PRESENT)


@pytest.mark.parametrize(
    ("other", "spec", "field"),
    [
        (replace(NAMESPACE, revision="r2"), SMALL, "revision: 'r1' here, 'r2' there"),
        (replace(NAMESPACE, model="another"), SMALL, "model: 'faults' here, 'another' there"),
        (replace(NAMESPACE, kv_heads=(2, 4)), SMALL, "kv_heads: None here, (2, 4) there"),
        (NAMESPACE, replace(SMALL, dtype="float16"), "spec.dtype: 'bfloat16' here, 'float16' there"),
    ],
    ids=["revision", "model", "kv_heads", "dtype"],
)
@over("LNTS")
def test_a_block_of_another_namespace_names_the_field_that_differs(
    store: Store, other: Namespace, spec: object, field: str
) -> None:
    with store.open(namespace=other, spec=spec) as writer:  # type: ignore[arg-type]  # a BlockSpec
        key = stored(writer, chain(4))
        deadline = time.monotonic() + 10  # objects get their description in the background
        while not described(store, other) and time.monotonic() < deadline:
            time.sleep(0.02)
    with store.open() as cache:
        detail = only(cache, key, Cause.NAMESPACE_DIFFERS).detail
        assert detail.endswith(f"they differ in {field}"), detail
        assert not any(report.present for report in cache.explain(key))
        only(cache, chain(4, seed=1), Cause.NOT_STORED)


def described(store: Store, other: Namespace) -> bool:
    if store.kind == "s3":
        objects = server_of(store).buckets["faults"].items()
        texts = [value.body.decode() for key, value in objects if "/namespaces/" in key]
    else:
        texts = [path.read_text() for path in (store.root / "namespaces").glob("*.json")]
    return any(json.loads(text)["identity"]["revision"] == other.revision for text in texts)


@over("LNTS")
def test_a_record_that_somebody_else_removed_has_vanished(store: Store) -> None:
    with store.open(**store.alone()) as cache:
        key = stored(cache, unrelated(0))
        if store.kind == "s3":  # as a lifecycle rule does
            store.remove(store.at(key))
            assert cache.fetch(key) is None  # or the cache goes on remembering that it is there
        else:
            with store.open() as other:
                assert other.delete(key) == 1
        cell = only(cache, key, Cause.VANISHED)
        assert recent(cell.at)
        assert "this process did not remove it" in cell.detail


@over("LNTS")
def test_a_tier_for_hot_blocks_has_not_admitted_what_was_used_once(store: Store) -> None:
    with store.open(l1="4MiB", admit="hot") as cache:
        key = stored(cache, chain(3))
        assert "second use" in only(cache, key, Cause.NOT_ADMITTED).detail
        only(cache, chain(3, seed=1), Cause.NOT_STORED)
        stored(cache, key)
        only(cache, key, Cause.PRESENT)


@over("LNTS")
def test_a_tier_for_evicted_blocks_has_not_admitted_what_is_in_l1(store: Store) -> None:
    with store.open(l1="4MiB", admit="evicted") as cache:
        key = stored(cache, chain(3))
        assert "leaves L1" in only(cache, key, Cause.NOT_ADMITTED).detail
        only(cache, key, Cause.PRESENT, "l1")


@over("LNTS")
def test_a_gated_tier_says_what_loading_and_computing_take(store: Store) -> None:
    with store.open() as cache:
        key = stored(cache, chain(8))
        for i in range(8):
            cache.fetch(key[i : i + 1])
        only(cache, key, Cause.PRESENT)
        for _ in range(20):
            cache.note_prefill(1_000_000, 1e-6)
        cell = only(cache, key, Cause.GATED)
        assert "loading 8 blocks takes" in cell.detail
        assert [(r.present, r.reachable) for r in cache.explain(key)] == [(True, False)] * 8


@over("LNTS")
def test_a_tier_that_was_not_opened_says_why(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no directory")
    absent = {"backend": "nvme", "name": "absent", "path": str(tmp_path / "file" / "x"), "required": False}
    with store.open(below=[absent]) as cache:
        key = stored(cache, chain(2))
        only(cache, key, Cause.PRESENT)
        assert str(tmp_path / "file") in only(cache, key, Cause.NOT_OPENED, "absent").detail


@over("S")
def test_a_failing_server_is_a_tier_down_first_and_suspended_later(store: Store) -> None:
    server = server_of(store)
    with store.open() as cache:
        key = stored(cache, chain(2))
        server.inject(Fault("error500"))
        assert "failed" in only(cache, chain(2, seed=1), Cause.TIER_DOWN).detail
        for i in range(12):
            cache.fetch(unrelated(i))
        assert cache.health().tiers[TIER].state == "down"
        assert "suspended" in only(cache, key, Cause.TIER_DOWN).detail
        server.inject()


@over("S")
def test_a_server_that_hangs_gives_no_answer_in_time(store: Store) -> None:
    server = server_of(store)
    with store.open(deadline=0.5) as cache:
        stored(cache, chain(2))
        server.inject(Fault("hang"))
        started = time.monotonic()
        assert "0.5 s" in only(cache, chain(2, seed=1), Cause.NO_ANSWER).detail
        assert time.monotonic() - started < 5
        server.inject()
        server.close_idle()


@over("S")
def test_a_write_under_way_is_queued(store: Store) -> None:
    server = server_of(store)
    with store.open(l1="4MiB") as cache:
        stored(cache, unrelated(0))
        server.latency_s = 1.0
        cache.put(unrelated(1), noise(SMALL, [1]))
        only(cache, unrelated(1), Cause.QUEUED)
        server.latency_s = 0.0
        cache.flush(10)
        only(cache, unrelated(1), Cause.PRESENT)


@over("LNTS")
def test_another_salt_is_another_block(store: Store) -> None:
    """Digests do not tell their salt, so the advice is to compare it."""
    with store.open() as cache:
        tokens = list(range(64))
        stored(cache, KVCacheKey.from_tokens(tokens, block_tokens=16, salt="a"))
        salted = KVCacheKey.from_tokens(tokens, block_tokens=16, salt="b")
        assert "salt" in only(cache, salted, Cause.NOT_STORED).detail


@over("LNTS")
def test_asking_changes_nothing(store: Store) -> None:
    with store.open(l1="4MiB") as cache:
        key = stored(cache, chain(4))
    with store.open(l1="4MiB") as cache:
        before = cache.stats()
        only(cache, key, Cause.PRESENT)
        only(cache, key, Cause.NOT_STORED, "l1")  # nothing was promoted
        after = cache.stats()
        assert (after.cache, after.tiers[0].counters) == (before.cache, before.tiers[0].counters)
        assert after.l1 == before.l1
        json.dumps([report.to_dict() for report in cache.explain(key)])


def test_a_report_is_plain_data() -> None:
    report = BlockReport(3, bytes(range(32)), True, False, (TierReport(TIER, Cause.GATED, "because", 1.5),))  # noqa: FBT003 - fields
    assert report.to_dict() == {
        "index": 3,
        "digest": bytes(range(32)).hex(),
        "present": True,
        "reachable": False,
        "tiers": [{"tier": TIER, "cause": "gated", "detail": "because", "at": 1.5}],
    }
    assert KVCache.explain.__doc__

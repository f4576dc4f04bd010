"""``kvstore gc``: by age, by size, and by heads where a medium knows no time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import BackendContext, PutItem, RecordInfo
from kvstore.blocks import BlockEncoder
from kvstore.cli.collect import Limits, delete, select
from kvstore.cli.command import EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from kvstore.cli.gc import Collecting
from kvstore.cli.main import main
from kvstore.memory_backend import MemoryBackend, MemoryOptions
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec
from kvstore.types import Call
from tests.unit.cli.stores import fill, opened

SPEC = BlockSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=4, dtype="bfloat16")
HOUR = 3600.0


class Timeless(MemoryBackend):
    """Lists records without a time, as a medium does that keeps none."""

    def scan(self) -> Iterator[RecordInfo]:
        for info in super().scan():
            yield RecordInfo(info.name, info.head_bytes, info.payload_bytes)


def records(ages_s: Sequence[float], *, now: float) -> list[PutItem]:
    """One record for each age in seconds; record i stands at index i of its sequence."""
    items = []
    for i, age_s in enumerate(ages_s):
        digest = bytes([i]) * 32
        encoder = BlockEncoder(SPEC, b"n" * 16, None, clock=partial(float, now - age_s))
        record = encoder.encode(memoryview(bytes(SPEC.nbytes)), RecordMeta(digest, bytes(32), i))
        items.append(PutItem(b"p" * 17 + digest, [bytes(buffer) for buffer in record.buffers]))
    return items


@pytest.fixture
def timeless() -> Iterator[Timeless]:
    backend = Timeless()
    backend.open(BackendContext("t", MemoryOptions()))
    yield backend
    backend.close()


def chosen(backend: MemoryBackend, limits: Limits, now: float) -> list[int]:
    """The records that would go, by their index, in order."""
    return [name[17] for name in select(backend, limits, lambda _: None, now=now).victims]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(max_age_s=2.5 * HOUR), [1, 3]),
        (Limits(max_age_s=9 * HOUR), []),
        (Limits(max_bytes=0), [1, 3, 0, 4, 2]),
        (Limits(max_age_s=1.5 * HOUR, max_bytes=10**9), [1, 3, 0]),
    ],
    ids=["age", "none", "all", "both"],
)
def test_the_oldest_records_go_first_by_their_heads(timeless: Timeless, limits: Limits, expected: list[int]) -> None:
    now = time.time()
    timeless.put_many(records([2 * HOUR, 4 * HOUR, 0, 3 * HOUR, HOUR], now=now), Call.within(5))
    assert chosen(timeless, limits, now) == expected


def test_of_records_of_one_second_the_tail_goes_first(timeless: Timeless) -> None:
    now = time.time()
    items = records([0.0] * 5, now=now)
    timeless.put_many(items, Call.within(5))
    keep = 3 * items[0].nbytes
    assert chosen(timeless, Limits(max_bytes=keep), now) == [4, 3]


def test_a_record_that_is_no_record_counts_as_new(timeless: Timeless) -> None:
    timeless.put_many([PutItem(b"x" * 49, [b"foreign"])], Call.within(5))
    assert chosen(timeless, Limits(max_age_s=HOUR), time.time()) == []


def test_delete_counts_what_was_still_there(timeless: Timeless) -> None:
    items = records([0.0] * 3, now=time.time())
    timeless.put_many(items, Call.within(5))
    steps: list[int] = []
    names = [item.name for item in items]
    timeless.delete_many(names[:1], Call.within(5))
    assert delete(timeless, names, steps.append) == 2
    assert steps == [3]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["gc", *arguments, "--json"]) == EXIT_OK
    return json.loads(capsys.readouterr().out)


def test_gc_by_age_leaves_what_is_younger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    fill(store)
    (report,) = run_json(capsys, str(store), "--older-than", "1h")
    assert (report["deleted"], report["records"]) == (0, 3)
    (report,) = run_json(capsys, str(store), "--older-than", "0s")
    assert (report["deleted"], report["records"]) == (3, 0)


def test_gc_by_size_keeps_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    fill(store)
    with opened(store) as backend:
        newest = max(backend.scan(), key=lambda info: info.last_use)
    (report,) = run_json(capsys, str(store), "--max-bytes", str(newest.nbytes) + "B")
    assert (report["deleted"], report["records"]) == (2, 1)
    with opened(store) as backend:
        assert [info.name for info in backend.scan()] == [newest.name]


def test_a_dry_run_deletes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    fill(store)
    (report,) = run_json(capsys, str(store), "--older-than", "0s", "--dry-run")
    assert (report["deleted"], report["records"], report["dry_run"]) == (3, 3, True)
    assert main(["gc", str(store), "--older-than", "0s", "--dry-run"]) == EXIT_OK
    assert "would delete 3 records" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--older-than", "7x"], "'7x' is no time"),
        (["--older-than", "7"], "'7' is no time"),
        (["--max-bytes", "10 GB/s"], "'10 GB/s' is no size"),
    ],
)
def test_limits_that_are_none_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["gc", str(tmp_path), *arguments])
    assert stopped.value.code == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_days_and_weeks_are_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    fill(store)
    for text in ("7d", "1.5d", "4w"):
        (report,) = run_json(capsys, str(store), "--older-than", text)
        assert report["deleted"] == 0


def test_no_limit_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(tmp_path)]) == EXIT_USAGE
    assert "--older-than" in capsys.readouterr().err


def test_a_backend_that_collects_by_itself_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_lmdb.backend import LmdbBackend

    store = tmp_path / "store"
    fill(store)
    asked: list[tuple[float | None, int | None]] = []

    def gc(self: LmdbBackend, *, max_age_s: float | None = None, max_bytes: int | None = None) -> tuple[int, int]:
        asked.append((max_age_s, max_bytes))
        return 7, 7 << 20

    monkeypatch.setattr(LmdbBackend, "gc", gc, raising=False)
    assert isinstance(LmdbBackend(), Collecting)
    (report,) = run_json(capsys, str(store), "--older-than", "2h", "--max-bytes", "1GiB")
    assert (report["deleted"], report["deleted_bytes"], report["records"]) == (7, 7 << 20, 3)
    assert asked == [(7200.0, 1 << 30)]


def test_a_store_that_cannot_be_listed_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_lmdb.backend import LmdbBackend

    from kvstore.backend import Backend

    store = tmp_path / "store"
    fill(store)
    monkeypatch.setattr(LmdbBackend, "scan", Backend.scan)
    assert main(["gc", str(store), "--older-than", "1h"]) == EXIT_UNAVAILABLE
    assert "tier 'lmdb' is passed over" in capsys.readouterr().err

"""``kvstore export`` and ``import``: records between stores of every kind, through files that nobody need trust."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import Namespace
from kvstore.cli.archive import FIRST, LAST, ArchiveWriter, Parcel
from kvstore.cli.command import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from kvstore.cli.lane import Lane
from kvstore.cli.main import main
from kvstore.objects.remembered import Remembered
from tests.stateful.media import BUCKET
from tests.support_s3 import make_bucket, moto_url
from tests.unit.cli.archives import members
from tests.unit.cli.tiers import (
    BRANCH,
    DIGEST,
    KEY,
    NAMESPACE,
    RECORDS,
    SPEC,
    MakeConfig,
    assert_all_delivered,
    backend_of,
    blocks,
    damage,
    delivered,
    fill,
    name_of,
    read,
    run_json,
    write_config,
)

__all__ = ["moto_url"]

OTHER = Namespace(model="other/model", revision="r1")


@pytest.fixture(scope="module")
def bucket_url(moto_url: str) -> str:
    """A server with the bucket that configs name."""
    make_bucket(moto_url, BUCKET)
    return moto_url


def test_blocks_are_the_same_bits_after_a_way_through_every_medium(
    make: MakeConfig, bucket_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = [
        make("lmdb", "start"),
        make("segments"),
        make("s3", url=bucket_url),
        make("tree"),
        make("lmdb"),
    ]
    fill(way[0])
    for i, (here, there) in enumerate(itertools.pairwise(way)):
        path = tmp_path / f"{i}.tar"
        assert run_json(capsys, "export", here, "--to", path)["records"] == RECORDS
        report = run_json(capsys, "import", there, "--from", path)
        assert (report["stored"], report["described"], report["refused"]) == (RECORDS, 1, [])
        assert_all_delivered(there)
        (stat,) = run_json(capsys, "stat", there)
        (entry,) = stat["namespaces"]
        assert (entry["records"], entry["orphans"], entry["tokens"]) == (RECORDS, 0, 16 * RECORDS)
        assert entry["description"]["identity"]["model"] == "some/model"


def test_a_store_is_copied_into_a_bucket_without_a_file_between(
    source: Path, make: MakeConfig, bucket_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = make("s3", "direct", url=bucket_url)
    assert run_json(capsys, "import", there, "--from", source)["stored"] == RECORDS
    assert_all_delivered(there)
    again = run_json(capsys, "import", there, "--from", source)
    assert (again["stored"], again["existing"]) == (0, RECORDS)


def test_a_bucket_of_more_names_than_a_process_remembers_is_exported_whole(
    source: Path, make: MakeConfig, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, back = make("s3", "many", url=bucket_url), make("lmdb", "back")
    assert main(["import", str(there), "--from", str(source)]) == EXIT_OK
    monkeypatch.setattr("kvstore.cli.outflow._BATCH_RECORDS", 5)  # across the ends of packs
    monkeypatch.setattr("kvstore.objects.remembered._LISTED", 32)
    monkeypatch.setattr("kvstore.objects.store.Remembered", lambda _, *ttls: Remembered(4, *ttls))
    assert main(["export", str(there), "--to", str(tmp_path / "many.tar")]) == EXIT_OK
    assert main(["import", str(back), "--from", str(tmp_path / "many.tar")]) == EXIT_OK
    assert_all_delivered(back)


def test_the_same_store_gives_the_same_bytes(source: Path, archive: Path, tmp_path: Path) -> None:
    assert main(["export", str(source), "--to", str(tmp_path / "again.tar")]) == EXIT_OK
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()


def test_any_tar_shows_the_records_as_they_are_stored(source: Path, archive: Path) -> None:
    found = members(archive)
    names = list(found)
    assert [names[0], names[-1]] == [FIRST, LAST]
    assert json.loads(found[f"{DIGEST.hex()}/namespace.json"]) == NAMESPACE.describe(SPEC)
    with backend_of(source) as backend:
        for i, digest in enumerate(KEY.digests):
            assert found[f"{DIGEST.hex()}/01/{digest.hex()}"] == read(backend, name_of(backend, i))


def test_parents_stand_before_their_children(archive: Path) -> None:
    order = {name.rpartition("/")[2]: i for i, name in enumerate(members(archive))}
    for key in (KEY, BRANCH):
        places = [order[digest.hex()] for digest in key.digests]
        assert places == sorted(places)


def test_an_archive_is_for_its_owner_and_appears_when_it_is_whole(archive: Path, tmp_path: Path, source: Path) -> None:
    assert archive.stat().st_mode & 0o777 == 0o600
    before = archive.read_bytes()
    assert main(["export", str(source), "--to", str(archive)]) == EXIT_USAGE
    assert archive.read_bytes() == before
    assert main(["export", str(source), "--to", str(archive), "--newest", "3", "--force"]) == EXIT_OK
    assert len(archive.read_bytes()) < len(before)
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*.partial"))


def test_an_interrupted_export_leaves_no_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ArchiveWriter.record

    def interrupted(self: ArchiveWriter, parcel: Parcel) -> None:
        record(self, parcel)
        if self.records == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ArchiveWriter, "record", interrupted)
    before = sorted(tmp_path.iterdir())
    assert main(["export", str(source), "--to", str(tmp_path / "kv.tar")]) == EXIT_INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_archives_go_through_pipes(source: Path, make: MakeConfig) -> None:
    there = make("segments")
    kvstore = [sys.executable, "-m", "kvstore"]
    with subprocess.Popen(
        [*kvstore, "export", str(source), "--to", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as sender:
        taker = subprocess.run(
            [*kvstore, "import", str(there), "--from", "-"],
            stdin=sender.stdout,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert sender.stderr is not None
        said = sender.stderr.read().decode()
    assert (sender.returncode, taker.returncode, taker.stderr) == (0, 0, "")
    assert f"wrote {RECORDS} records of 1 namespace to standard output" in said
    assert f"stored {RECORDS} records" in taker.stdout
    assert_all_delivered(there)


def test_damaged_records_do_not_travel(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(source, 5, -1)
    damage(source, 7, 20)  # the namespace in its head
    report = run_json(capsys, "export", source, "--to", tmp_path / "kv.tar", code=EXIT_FINDINGS)
    assert (report["records"], report["damaged"]) == (RECORDS - 2, 1)
    (refused,) = report["refused"]
    assert "checksum" in refused["reason"]
    assert refused["name"].endswith(KEY.digests[5].hex())


def test_cleared_records_do_not_travel(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with backend_of(source) as backend:
        backend.epoch(DIGEST, bump=True)
    assert main(["export", str(source), "--to", str(tmp_path / "kv.tar")]) == EXIT_USAGE
    assert "holds no records to export" in capsys.readouterr().err
    fill(source)
    report = run_json(capsys, "export", source, "--to", tmp_path / "kv.tar")
    assert (report["records"], report["cleared"]) == (RECORDS, RECORDS)


def test_records_get_the_names_of_the_store_they_come_into(
    archive: Path, make: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    there = make("lmdb")
    fill(there)
    with backend_of(there) as backend:
        backend.epoch(DIGEST, bump=True)
    assert delivered(there, KEY, blocks()) == 0
    assert run_json(capsys, "import", there, "--from", archive)["stored"] == RECORDS
    assert_all_delivered(there)


def test_the_newest_records_are_the_heads_of_what_was_used_last(
    source: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with backend_of(source) as backend:
        (nbytes,) = {info.nbytes for info in backend.scan()}
        now = {info.name: info.last_use for info in backend.scan()}
        assert now
        backend.touch_many([name_of(backend, i) for i in reversed(range(10))])
        backend.maintain()
    for i, option in enumerate((("--newest", "10"), ("--max-bytes", f"{10 * nbytes + 1}B"))):
        there, path = make("lmdb", f"newest{i}"), tmp_path / f"{i}.tar"
        assert run_json(capsys, "export", source, "--to", path, *option)["records"] == 10
        assert main(["import", str(there), "--from", str(path)]) == EXIT_OK
        assert delivered(there, KEY, blocks()) == 10


def test_an_archive_that_nobody_reads_to_its_end_is_a_failure(source: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "export", str(source), "--to", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        assert sender.stdout is not None
        assert sender.stderr is not None
        sender.stdout.read(1000)
        sender.stdout.close()
        assert sender.wait(60) == EXIT_FINDINGS
        assert sender.stderr.read().decode() == "kvstore: whoever read the archive has gone; it is not whole\n"


def test_an_interrupted_import_keeps_what_came_and_goes_on_later(
    archive: Path, make: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, add = make("lmdb", "there"), Lane.add
    taken = itertools.count()

    def interrupted(self: Lane, parcel: Parcel) -> None:
        add(self, parcel)
        if next(taken) == 45:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Lane, "add", interrupted)
    assert main(["import", str(there), "--from", str(archive)]) == EXIT_INTERRUPTED
    report = run_json(capsys, "import", there, "--from", archive)
    assert report["existing"] >= 32
    assert report["stored"] + report["existing"] == RECORDS
    assert_all_delivered(there)


def test_one_namespace_travels_alone(
    source: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(source, OTHER)
    every = tmp_path / "every.tar"
    assert run_json(capsys, "export", source, "--to", every)["namespaces"] == 2
    for i, name in enumerate(("other/model", OTHER.digest(SPEC).hex()[:12])):
        path = tmp_path / f"{i}.tar"
        assert run_json(capsys, "export", source, "--to", path, "--namespace", name)["records"] == RECORDS
        for origin in (source, every, path):
            there = make("lmdb", f"{i}{origin.stem}")
            report = run_json(capsys, "import", there, "--from", origin, "--namespace", name)
            assert (report["stored"], report["described"]) == (RECORDS, 1)
            assert_all_delivered(there, OTHER)
            assert delivered(there, KEY, blocks()) == 0
    assert main(["export", str(source), "--to", str(tmp_path / "x"), "--namespace", "no/model"]) == EXIT_USAGE
    assert "other/model" in capsys.readouterr().err


def test_a_store_that_gets_full_keeps_what_came_first(
    archive: Path, make: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    there = make("lmdb", "small", capacity="512KiB")
    report = run_json(capsys, "import", there, "--from", archive)
    assert report["stored"] + report["left_out"] == RECORDS
    assert 10 < report["stored"] < 30
    first = max(delivered(there, KEY, blocks()), 0)
    assert first >= report["stored"] - 1
    assert main(["import", str(there), "--from", str(archive)]) == EXIT_OK
    assert "the store is full of those that came first" in capsys.readouterr().out


def test_an_import_makes_a_store_when_the_backend_is_named(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "new"
    assert main(["import", str(there), "--from", str(archive)]) == EXIT_USAGE
    assert not there.exists()
    capsys.readouterr()
    report = run_json(capsys, "import", there, "--backend", "lmdb", "--from", archive)
    assert report["stored"] == RECORDS
    assert_all_delivered(write_config(tmp_path / "new.toml", {"backend": "lmdb", "path": str(there)}))


def test_tiers_of_a_config_are_named(tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [
        {"backend": "lmdb", "path": str(tmp_path / "l"), "name": "one"},
        {"backend": "nvme", "path": str(tmp_path / "n"), "name": "two", "capacity": "64MiB"},
    ]
    config = write_config(tmp_path / "both.toml", *tiers)
    assert main(["import", str(config), "--from", str(archive)]) == EXIT_USAGE
    assert "several tiers (one, two); name one with --tier" in capsys.readouterr().err
    assert main(["import", str(config), "--tier", "one", "--from", str(archive)]) == EXIT_OK
    assert main(["import", str(config), "--tier", "two", "--from", str(config)]) == EXIT_USAGE
    assert "--from-tier" in capsys.readouterr().err
    report = run_json(capsys, "import", config, "--tier", "two", "--from", config, "--from-tier", "one")
    assert report["stored"] == RECORDS
    assert_all_delivered(write_config(tmp_path / "two.toml", tiers[1]))


def test_a_medium_that_does_not_answer_is_said_to(
    archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(make("s3", url="http://127.0.0.1:9")), "--from", str(archive)]) == EXIT_UNAVAILABLE
    assert main(["export", str(make("lmdb", "none")), "--to", str(tmp_path / "x.tar")]) == EXIT_UNAVAILABLE
    assert capsys.readouterr().err.count("kvstore: ") == 2
    assert not (tmp_path / "x.tar").exists()

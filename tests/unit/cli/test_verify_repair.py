"""``kvstore verify`` that changes something: good copies from other tiers, quarantine, dropping."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE
from kvstore.cli.main import main
from kvstore.cli.quarantine import LOG, Quarantine
from tests.faults.s3_faults import S3FaultServer
from tests.stateful.media import BUCKET, Place
from tests.unit.cli.tiers import (
    BRANCH,
    KEY,
    RECORDS,
    assert_all_delivered,
    backend_of,
    blocks,
    branch_blocks,
    damage,
    delivered,
    fill,
    name_of,
    read,
    read_listed,
    run_json,
    write_config,
)


@pytest.fixture(scope="module")
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer(BUCKET) as server:
        yield server


class Tiers:
    """Configs over the same stores: all together, and each alone."""

    def __init__(self, root: Path, url: str, *media: str, defaults: str = "") -> None:
        self._root = root
        self._defaults = defaults
        place = Place(root, url)
        self._sections: list[dict[str, Any]] = [
            place.tier(medium, f"{root.name}-{i}", capacity="64MiB") | {"name": f"t{i}"}
            for i, medium in enumerate(media)
        ]
        self.all = write_config(root / "all.toml", *self._sections, defaults=defaults)

    def alone(self, i: int) -> Path:
        return write_config(self._root / f"t{i}.toml", self._sections[i], defaults=self._defaults)


def tiers(tmp_path: Path, *media: str, url: str = "") -> Tiers:
    made = Tiers(tmp_path, url, *media)
    fill(made.all)
    for i in range(len(media)):
        assert_all_delivered(made.alone(i))
    return made


def spoil_pack(server: S3FaultServer, config: Path, i: int) -> None:
    """Flip a bit of block ``i`` of KEY inside every object that holds it."""
    with backend_of(config) as backend:
        record = read_listed(backend, i)
    for objects in server.buckets.values():
        for stored in objects.values():
            at = stored.body.find(record[:192])
            if at >= 0:
                body = bytearray(stored.body)
                body[at + len(record) - 1] ^= 1
                stored.body = bytes(body)


@pytest.mark.parametrize(("medium", "other"), [("lmdb", "segments"), ("segments", "tree"), ("tree", "lmdb")])
def test_a_damaged_record_is_replaced_from_the_tier_below(
    medium: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, medium, other)
    damage(made.alone(0), 3, -1)
    assert delivered(made.alone(0), KEY, blocks()) == 3  # which drops it, so damage it again
    fill(made.alone(0))
    damage(made.alone(0), 3, -1)
    damage(made.alone(0), 30, 40)
    below, above = reversed(run_json(capsys, "verify", made.all, "--repair", code=EXIT_FINDINGS))
    assert (above["tier"], len(above["corrupt"]), above["repaired"], above["left"]) == ("t0", 2, {"t1": 2}, 0)
    assert (below["tier"], below["corrupt"], below["repaired"]) == ("t1", [], {})
    assert_all_delivered(made.alone(0))
    (again,) = run_json(capsys, "verify", made.alone(0))
    assert (again["sound"], again["corrupt"]) == (RECORDS, [])


def test_an_upper_tier_helps_where_no_lower_one_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiers(tmp_path, "lmdb", "segments", "tree")
    damage(made.alone(1), 0, -1)
    damage(made.alone(1), 7, -1)
    damage(made.alone(2), 7, -1)
    reports = {r["tier"]: r for r in run_json(capsys, "verify", made.all, "--repair", code=EXIT_FINDINGS)}
    assert reports["t1"]["repaired"] == {"t2": 1, "t0": 1}
    assert reports["t2"]["repaired"] == {"t1": 1}
    for i in range(3):
        assert_all_delivered(made.alone(i))


def test_a_record_whose_head_is_gone_is_repaired_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, "lmdb", "segments")
    for i, at in ((0, 0), (1, 17), (2, 33)):  # magic, namespace, digest
        damage(made.alone(0), i, at)
    (report,) = run_json(capsys, "verify", made.all, "--tier", "t0", "--repair", code=EXIT_FINDINGS)
    assert report["repaired"] == {"t1": 3}
    assert_all_delivered(made.alone(0))


def test_without_a_good_copy_a_record_stays_unless_it_is_to_be_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, "lmdb", "segments")
    bad = damage(made.alone(0), 5, -1)
    damage(made.alone(1), 5, -1)
    arguments = ("verify", made.all, "--tier", "t0", "--repair")
    (report,) = run_json(capsys, *arguments, code=EXIT_FINDINGS)
    assert (report["repaired"], report["left"], report["dropped"]) == ({}, 1, 0)
    with backend_of(made.alone(0)) as backend:
        assert read(backend, name_of(backend, 5)) == bad
    (report,) = run_json(capsys, *arguments, "--drop-corrupt", code=EXIT_FINDINGS)
    assert (report["repaired"], report["left"], report["dropped"]) == ({}, 0, 1)
    with backend_of(made.alone(0)) as backend:
        assert read(backend, name_of(backend, 5)) == b""
    assert delivered(made.alone(0), KEY, blocks()) == 5


def test_repair_needs_another_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Tiers(tmp_path, "", "lmdb")
    fill(made.all)
    assert main(["verify", str(made.all), "--repair"]) == EXIT_USAGE
    assert "--repair takes good copies from another one" in capsys.readouterr().err


def test_a_tier_that_cannot_be_opened_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, "lmdb", "segments")
    damage(made.alone(0), 5, -1)
    gone = {"backend": "lmdb", "path": str(tmp_path / "gone"), "name": "gone"}
    config = tmp_path / "more.toml"
    config.write_text(made.all.read_text() + "\n[[l2]]\n" + "\n".join(f'{k} = "{v}"' for k, v in gone.items()))
    assert main(["verify", str(config), "--tier", "t0", "--repair"]) == EXIT_FINDINGS
    captured = capsys.readouterr()
    assert "repaired 1 record from tier 't1'" in captured.out
    damage(made.alone(0), 5, -1)
    damage(made.alone(1), 5, -1)
    assert main(["verify", str(config), "--tier", "t0", "--repair"]) == EXIT_FINDINGS
    captured = capsys.readouterr()
    assert "tier 'gone' cannot help to repair" in captured.err
    assert "left 1 record in place" in captured.out


def test_a_pack_is_whole_again_after_one_of_its_records_was_repaired(
    tmp_path: Path, server: S3FaultServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, "lmdb", "s3", url=server.url)
    monkeypatch.setattr("kvstore.objects.remembered._LISTED", 64)  # of a bucket with more names than that
    for i in (2, 28, 37):
        spoil_pack(server, made.alone(1), i)
    (report,) = run_json(capsys, "verify", made.all, "--tier", "t1", "--repair", code=EXIT_FINDINGS)
    assert (len(report["corrupt"]), report["repaired"], report["lost"]) == (3, {"t0": 3}, 0)
    assert_all_delivered(made.alone(1))
    (again,) = run_json(capsys, "verify", made.alone(1))
    assert (again["corrupt"], again["sound"]) == ([], RECORDS)


def test_dropping_from_a_pack_costs_what_stands_behind_and_nothing_before(
    tmp_path: Path, server: S3FaultServer, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, "s3", url=server.url)
    spoil_pack(server, made.all, 5)
    (report,) = run_json(capsys, "verify", made.all, "--drop-corrupt", code=EXIT_FINDINGS)
    assert (report["dropped"], report["lost"]) == (1, 10)  # of the pack of 16
    assert delivered(made.all, KEY, blocks()) == 5
    assert delivered(made.all, BRANCH, branch_blocks()) == 5
    assert main(["verify", str(made.all)]) == EXIT_OK


def test_a_bucket_gives_good_copies_out_of_its_packs(
    tmp_path: Path, server: S3FaultServer, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiers(tmp_path, "segments", "s3", url=server.url)
    for i in (1, 14, 39):
        damage(made.alone(0), i, -1)
    (report,) = run_json(capsys, "verify", made.all, "--tier", "t0", "--repair", code=EXIT_FINDINGS)
    assert report["repaired"] == {"t1": 3}
    assert_all_delivered(made.alone(0))


def test_quarantine_keeps_the_bytes_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Tiers(tmp_path, "", "lmdb")
    fill(made.all)
    bad = damage(made.all, 5, -1)
    kept = tmp_path / "kept"
    (report,) = run_json(capsys, "verify", made.all, "--quarantine", kept, code=EXIT_FINDINGS)
    assert (report["quarantined"], report["dropped"]) == (1, 1)
    (line,) = [json.loads(text) for text in (kept / LOG).read_text().splitlines()]
    assert (line["tier"], line["reason"], line["bytes"]) == ("t0", "checksum", len(bad))
    assert line["name"].endswith(KEY.digests[5].hex())
    file = kept / line["file"]
    assert file.read_bytes() == bad
    assert [path.stat().st_mode & 0o777 for path in (kept, file, kept / LOG)] == [0o700, 0o600, 0o600]
    assert delivered(made.all, KEY, blocks()) == 5


def test_quarantine_and_repair_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiers(tmp_path, "lmdb", "segments")
    bad = damage(made.alone(0), 5, 0)
    arguments = ("verify", made.all, "--tier", "t0", "--repair", "--quarantine", tmp_path / "kept")
    (report,) = run_json(capsys, *arguments, code=EXIT_FINDINGS)
    assert (report["quarantined"], report["repaired"], report["dropped"]) == (1, {"t1": 1}, 0)
    assert [path.read_bytes() for path in (tmp_path / "kept").glob("*.record")] == [bad]
    assert_all_delivered(made.alone(0))


def test_the_same_record_is_kept_again_beside_the_first_one(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "kept")
    first, second = (quarantine.keep(b"n" * 49, data, {}) for data in (b"one", b"two"))
    assert [(tmp_path / "kept" / name).read_bytes() for name in (first, second)] == [b"one", b"two"]
    assert len(quarantine.keep(b"n" * 255, b"long", {})) < 255
    quarantine.close()


def test_quarantine_follows_no_link_and_trusts_no_open_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Tiers(tmp_path, "", "lmdb")
    fill(made.all)
    damage(made.all, 5, -1)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, message in (("link", "is a link"), ("open", "can be changed by others")):
        assert main(["verify", str(made.all), "--quarantine", str(tmp_path / name)]) == EXIT_USAGE
        assert message in capsys.readouterr().err
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    with backend_of(made.all) as backend:
        (tmp_path / "real" / f"{name_of(backend, 5).hex()}.record").symlink_to(victim)
    (report,) = run_json(capsys, "verify", made.all, "--quarantine", tmp_path / "real", code=EXIT_FINDINGS)
    assert report["quarantined"] == 1  # under another name
    assert victim.read_bytes() == b"precious"


def test_what_cannot_be_kept_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Tiers(tmp_path, "", "lmdb")
    fill(made.all)
    bad = damage(made.all, 5, -1)

    def full(self: Quarantine, line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Quarantine, "_log", full)
    kept = tmp_path / "kept"
    (report,) = run_json(capsys, "verify", made.all, "--quarantine", kept, "--drop-corrupt", code=EXIT_FINDINGS)
    assert (report["quarantined"], report["dropped"], report["left"]) == (0, 0, 1)
    assert "No space left" in report["quarantine_failed"]
    assert list(kept.iterdir()) == []
    with backend_of(made.all) as backend:
        assert read(backend, name_of(backend, 5)) == bad


def test_a_sample_is_a_part_of_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Tiers(tmp_path, "", "lmdb")
    fill(made.all)
    counts = [run_json(capsys, "verify", made.all, "--sample", "50%")[0]["records"] for _ in range(4)]
    assert all(5 <= count <= 54 for count in counts)  # 1e-10 of all samples are not
    assert run_json(capsys, "verify", made.all, "--limit", "7")[0]["records"] == 7
    for text in ("0", "101%", "-3", "some", "nan"):
        with pytest.raises(SystemExit, match="2"):
            main(["verify", str(made.all), f"--sample={text}"])
        assert f"{text!r} is no percentage above 0" in capsys.readouterr().err


def test_records_made_without_the_keys_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORE_TEST_KEY", "5a" * 32)
    made = Tiers(tmp_path, "", "lmdb")
    fill(made.all)
    damage(made.all, 5, -1)
    keyed = Tiers(tmp_path, "", "lmdb", defaults='record_keys = ["env:KVSTORE_TEST_KEY"]')
    (report,) = run_json(capsys, "verify", keyed.all, "--drop-corrupt", code=EXIT_FINDINGS)
    assert (len(report["corrupt"]), len(report["unauthenticated"])) == (1, RECORDS - 1)
    assert (report["dropped"], report["left"]) == (1, RECORDS - 1)
    assert main(["verify", str(keyed.all)]) == EXIT_FINDINGS
    assert f"0 corrupt, {RECORDS - 1} unauthenticated" in capsys.readouterr().out
    (report,) = run_json(capsys, "verify", keyed.all, "--drop-unauthenticated", code=EXIT_FINDINGS)
    assert report["dropped"] == RECORDS - 1
    fill(keyed.all)
    (report,) = run_json(capsys, "verify", keyed.all)
    assert (report["sound"], report["unauthenticated"]) == (RECORDS, [])
    assert_all_delivered(keyed.all)


def test_only_authenticated_records_leave_and_enter_stores_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORE_TEST_KEY", "5a" * 32)
    defaults = 'record_keys = ["env:KVSTORE_TEST_KEY"]'
    (tmp_path / "keyed").mkdir()
    plain, keyed = Tiers(tmp_path, "", "lmdb"), Tiers(tmp_path / "keyed", "", "lmdb", "segments", defaults=defaults)
    fill(plain.all)
    archive = tmp_path / "plain.tar"
    assert main(["export", str(plain.all), "--to", str(archive)]) == EXIT_OK
    report = run_json(capsys, "import", keyed.alone(0), "--from", archive, code=EXIT_FINDINGS)
    assert (report["stored"], len(report["refused"])) == (0, RECORDS)
    fill(keyed.alone(0))
    report = run_json(capsys, "import", keyed.alone(1), "--from", keyed.alone(0))
    assert (report["stored"], report["refused"]) == (RECORDS, [])
    assert_all_delivered(keyed.alone(1))

"""Archives that are cut off, damaged or made to do harm: everything sound is taken, and nothing else."""

from __future__ import annotations

import json
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli.archive import FIRST, LAST
from kvstore.cli.command import EXIT_FINDINGS, EXIT_USAGE
from kvstore.cli.main import main
from kvstore.record import unpack_head
from kvstore.types import Call
from tests.unit.cli.archives import link, members, plain, write_tar
from tests.unit.cli.tiers import (
    DIGEST,
    KEY,
    NAMESPACE,
    RECORDS,
    SPEC,
    MakeConfig,
    assert_all_delivered,
    backend_of,
    blocks,
    delivered,
    name_of,
    run_json,
)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.9999], ids=["tenth", "half", "most", "end"])
def test_of_an_archive_that_is_cut_off_everything_whole_is_taken(
    fraction: float, archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, cut, data = make("lmdb"), tmp_path / "cut.tar", archive.read_bytes()
    cut.write_bytes(data[: int(fraction * data.rindex(LAST.encode()))])
    report = run_json(capsys, "import", there, "--from", cut, code=EXIT_FINDINGS)
    assert 0 < report["stored"] < RECORDS or fraction > 0.99
    assert "cut off" in report["cut_off"]
    with backend_of(there) as backend:
        assert backend.usage().records == report["stored"]
    report = run_json(capsys, "import", there, "--from", archive)
    assert report["stored"] + report["existing"] == RECORDS
    assert_all_delivered(there)


def test_an_archive_without_its_end_is_not_whole(
    archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = members(archive)
    del found[LAST]
    path = write_tar(tmp_path / "endless.tar", found)
    report = run_json(capsys, "import", make("lmdb"), "--from", path, code=EXIT_FINDINGS)
    assert (report["stored"], LAST in report["cut_off"]) == (RECORDS, True)


RECORD = f"{DIGEST.hex()}/01/{KEY.digests[0].hex()}"
HOSTILE = {
    "escapes": plain("\x1b[2J\x1b]0;owned\x07", b"x"),
    "no-utf8": plain("\udcff\udcfe", b"x"),
    "path": plain("../../escaped", b"x" * 600),
    "absolute": plain("/tmp/escaped", b"x"),  # noqa: S108 - a name inside an archive
    "link": link(RECORD, "/etc/passwd", tarfile.SYMTYPE),
    "hard-link": link(RECORD, FIRST, tarfile.LNKTYPE),
    "device": link(RECORD, "", tarfile.CHRTYPE),
    "short": plain(RECORD, b"KVB\x01"),
    "empty": plain(RECORD, b""),
    "noise": plain(RECORD, bytes(range(256)) * 80),
    "long-description": plain(f"{DIGEST.hex()}/namespace.json", b" " * ((1 << 20) + 1)),
    "no-text": plain(f"{DIGEST.hex()}/namespace.json", b"\xff\xfe"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_refused_and_the_others_taken(
    name: str, archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = make("lmdb")
    path = write_tar(tmp_path / "hostile.tar", members(archive), HOSTILE[name])
    before = set(tmp_path.parent.rglob("*escaped*"))
    report = run_json(capsys, "import", there, "--from", path, code=EXIT_FINDINGS)
    (refused,) = report["refused"]
    assert refused["name"] in {HOSTILE[name][0].name, "\ufffd\ufffd"}
    assert report["stored"] == RECORDS
    assert set(tmp_path.parent.rglob("*escaped*")) == before
    assert_all_delivered(there)


def test_names_in_an_archive_do_not_reach_the_terminal_as_they_are(
    archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tar(tmp_path / "escapes.tar", members(archive), HOSTILE["escapes"])
    assert main(["import", str(make("lmdb")), "--from", str(path)]) == EXIT_FINDINGS
    out = capsys.readouterr().out
    assert "left out ?[2J?]0;owned?" in out
    assert "\x1b" not in out


def swap_payload(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{DIGEST.hex()}/01/{KEY.digests[3].hex()}", swap_payload),
        (f"{DIGEST.hex()}/01/{'00' * 32}", bytes),
        (f"{'00' * 16}/01/{KEY.digests[3].hex()}", bytes),
        (f"{DIGEST.hex()}/09/{KEY.digests[3].hex()}", bytes),
        (f"{DIGEST.hex()}/01/{KEY.digests[3].hex()}", lambda record: record + b"\0"),
    ],
    ids=["payload", "digest", "namespace", "kind", "trailing"],
)
def test_records_that_are_not_what_their_name_says_are_refused(
    name: str,
    change: Callable[[bytes], bytes],
    archive: Path,
    make: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there, found = make("lmdb"), members(archive)
    record = found.pop(f"{DIGEST.hex()}/01/{KEY.digests[3].hex()}")
    end = found.pop(LAST)
    path = write_tar(tmp_path / "wrong.tar", found | {name: change(record), LAST: end})
    report = run_json(capsys, "import", there, "--from", path, code=EXIT_FINDINGS)
    assert [refused["name"] for refused in report["refused"]] == [name]
    assert (report["stored"], report["cut_off"]) == (RECORDS - 1, "")
    assert delivered(there, KEY, blocks()) == 3


@pytest.mark.parametrize("stored_bytes", [3 << 30, 7 << 30], ids=["possible", "impossible"])
def test_a_length_that_never_comes_takes_no_memory(
    stored_bytes: int, archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = bytearray(members(archive)[RECORD])
    record[136:144] = stored_bytes.to_bytes(8, "little")
    info = tarfile.TarInfo(RECORD)
    info.size = unpack_head(memoryview(record)).record_bytes
    path = tmp_path / "promise.tar"
    path.write_bytes(archive.read_bytes()[:1024] + info.tobuf(tarfile.USTAR_FORMAT) + record)
    tracemalloc.start()
    try:
        report = run_json(capsys, "import", make("lmdb"), "--from", path, code=EXIT_FINDINGS)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (report["stored"], "cut off" in report["cut_off"]) == (0, True)
    assert peak_bytes < 64 << 20


def test_a_broken_header_ends_the_archive(
    archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(archive.read_bytes())
    at = data.index(KEY.digests[20].hex().encode())
    data[at] ^= 1
    path = tmp_path / "broken.tar"
    path.write_bytes(data)
    report = run_json(capsys, "import", make("lmdb"), "--from", path, code=EXIT_FINDINGS)
    assert 0 < report["stored"] < RECORDS
    assert "header" in report["cut_off"]


def test_what_is_no_archive_is_a_usage_error(
    make: MakeConfig, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = make("lmdb")
    foreign = write_tar(tmp_path / "foreign.tar", {"readme": b"hello"})
    newer = write_tar(tmp_path / "newer.tar", {FIRST: b'{"format": "kvstore-archive", "version": 2}'})
    packed = tmp_path / "kv.tar.gz"
    packed.write_bytes(b"\x1f\x8b" + archive.read_bytes()[:4000])
    empty = tmp_path / "empty.tar"
    empty.write_bytes(b"")
    for path, message in (
        (foreign, "not an archive of kvstore export"),
        (newer, "an archive of version 2"),
        (packed, "unpack a compressed one first"),
        (empty, "not an archive of kvstore export"),
        (tmp_path / "none.tar", "cannot be read: No such file"),
    ):
        assert main(["import", str(there), "--from", str(path)]) == EXIT_USAGE
        assert message in capsys.readouterr().err
    assert main(["import", str(there), "--from", str(archive), "--newest", "3"]) == EXIT_USAGE
    assert "--newest is for stores" in capsys.readouterr().err


def test_a_description_that_does_not_prove_itself_is_not_kept(
    archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, found = make("lmdb"), members(archive)
    document = NAMESPACE.describe(SPEC)
    document["identity"]["model"] = "somebody/else"
    found[f"{DIGEST.hex()}/namespace.json"] = json.dumps(document).encode()
    report = run_json(capsys, "import", there, "--from", write_tar(tmp_path / "liar.tar", found))
    assert (report["described"], report["undescribed"], report["stored"]) == (0, 1, RECORDS)
    (stat,) = run_json(capsys, "stat", there)
    assert stat["namespaces"][0]["description"] is None
    assert_all_delivered(there)


def test_a_second_copy_of_a_record_is_no_second_record(
    archive: Path, make: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = members(archive)
    path = write_tar(tmp_path / "twice.tar", found, plain(RECORD, found[RECORD]))
    there = make("lmdb")
    report = run_json(capsys, "import", there, "--from", path, code=EXIT_FINDINGS)
    assert "it says that it holds" in report["cut_off"]
    with backend_of(there) as backend:
        assert backend.usage().records == RECORDS
        assert backend.delete_many([name_of(backend, 0)], Call.within(5)) == 1

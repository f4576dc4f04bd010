"""No link leads kvstore out of its directory: not the ones it opens, not the ones it writes.

That links planted in a store are not followed, file by file and folder by folder, is what A23 shows; here is that no
place was forgotten, and what the command line writes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.cli.demo.errors import DemoSetupError
from kvstore.cli.demo.facts import Outcome
from kvstore.cli.demo.html import write_html
from kvstore.cli.demo.png import write_png
from kvstore.cli.demo.store import empty_store
from kvstore.cli.main import main
from kvstore.private_files import make_private_directory, open_private_file, read_small_file, write_private_file
from tests.faults.media import MEDIA
from tests.faults.process import Forge
from tests.unit.cli.stores import fill

ON_DISK = ("lmdb", "nvme", "tree")
OUTSIDE = b"nobody may read or change this"

# Uses a store in every way, and reports what it opened below it without refusing links.
WATCHED = """
import contextlib, io, traceback
from kvstore.cli.main import main
followed, opened = [], 0
def hook(event, args):
    global opened
    if event != "open" or not isinstance(args[0], (str, bytes, os.PathLike)):
        return
    if os.fsdecode(args[0]).startswith(f"{STORE.root}/"):
        opened += 1
        if not args[2] & os.O_NOFOLLOW:
            frames = traceback.extract_stack()[:-1]
            ours = [f"{f.filename}:{f.lineno}" for f in frames if "/kvstore" in f.filename]
            followed.append([os.fsdecode(args[0]), *ours[-2:]])
sys.addaudithook(hook)
for turn in range(2):
    with STORE.open(capacity="4MiB") as cache:
        for i in range(160):  # more than fits
            cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        cache.fetch(unrelated(159))
        list(cache.stream(unrelated(158)))
        cache.stats(), cache.health(), cache.delete(unrelated(0))
        if turn:
            cache.clear()
config = STORE.root.with_suffix(".toml")
config.write_text("[[l2]]\\n" + "".join(f"{k} = {json.dumps(v)}\\n" for k, v in STORE.section().items()))
with contextlib.redirect_stdout(io.StringIO()):
    for command in (["stat"], ["ls"], ["verify"]):
        args = [*command, "--config", str(config)]
        assert main(args) == 0, args
    assert main(["doctor", str(config)]) in (0, 1)  # it may have something to say about the machine
print(json.dumps([opened, followed]))
"""


@pytest.mark.parametrize("kind", ON_DISK)
def test_everything_that_is_opened_in_a_store_refuses_links(kind: str, forge: Forge, tmp_path: Path) -> None:
    opened, followed = forge.work(WATCHED, MEDIA[kind].make(tmp_path / "store"))
    assert opened > 5
    assert followed == []


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file elsewhere that links point to."""
    path = tmp_path / "outside"
    path.write_bytes(OUTSIDE)
    return path


def test_init_writes_no_config_through_a_link(tmp_path: Path, outside: Path) -> None:
    config = tmp_path / "kvstore.toml"
    config.symlink_to(outside)
    assert main(["init", str(config)]) == 2
    assert config.is_symlink()
    assert main(["init", str(config), "--force"]) == 0
    assert not config.is_symlink()
    assert "[l1]" in config.read_text()
    assert outside.read_bytes() == OUTSIDE


def test_init_writes_no_config_through_a_link_that_leads_nowhere_yet(tmp_path: Path) -> None:
    config = tmp_path / "kvstore.toml"
    config.symlink_to(tmp_path / "new")
    assert main(["init", str(config)]) == 2
    assert not (tmp_path / "new").exists()


def test_export_writes_no_archive_through_a_link(tmp_path: Path, outside: Path) -> None:
    fill(tmp_path / "store")
    archive = tmp_path / "archive.tar"
    archive.symlink_to(outside)
    assert main(["export", str(tmp_path / "store"), "--to", str(archive)]) == 2
    main(["export", str(tmp_path / "store"), "--to", str(archive), "--force"])
    assert outside.read_bytes() == OUTSIDE


def test_the_demo_writes_no_report_through_a_link(tmp_path: Path, outside: Path, outcome: Outcome) -> None:
    for name, write in (("report.html", write_html), ("report.png", write_png)):
        report = tmp_path / name
        report.symlink_to(outside)
        write(outcome, report)
        assert outside.read_bytes() == OUTSIDE
        assert not report.is_symlink()
        assert len(report.read_bytes()) > 1000


def test_the_demo_takes_no_folder_for_its_own_because_of_a_link(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "precious").write_bytes(b"x")
    (folder / ".kvstore-demo").symlink_to(outside)
    with pytest.raises(DemoSetupError, match="not made by"), empty_store(folder):
        pass
    assert (folder / "precious").exists()
    assert outside.read_bytes() == OUTSIDE


# -- the functions themselves


def test_a_small_file_is_read_only_if_it_is_one(tmp_path: Path, outside: Path) -> None:
    assert read_small_file(outside, 100) == OUTSIDE
    assert read_small_file(outside, len(OUTSIDE) - 1) is None
    (tmp_path / "link").symlink_to(outside)
    os.mkfifo(tmp_path / "pipe")
    for other in ("link", "pipe", "missing"):
        assert read_small_file(tmp_path / other, 100) is None
    assert read_small_file(tmp_path, 1 << 20) is None


def test_a_private_file_is_not_opened_through_a_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError, match="link"):
        open_private_file(tmp_path / "link")
    os.close(open_private_file(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private_file(tmp_path / "folder", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_directory_below_a_link_that_leads_nowhere_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        make_private_directory(tmp_path / "link" / "store")
    assert not (tmp_path / "nowhere").exists()

"""The demo empties its own folder and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli.demo.errors import DemoSetupError
from kvstore.cli.demo.store import empty_store


def test_own_folder_is_emptied_at_every_start(tmp_path: Path) -> None:
    with empty_store(tmp_path / "store") as store:
        (store / "lmdb").mkdir()
        (store / "lmdb" / "data").write_text("old")
        (store / "file").write_text("old")
    with empty_store(tmp_path / "store") as store:
        assert [entry.name for entry in store.iterdir()] == [".kvstore-demo"]


def test_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")

    with pytest.raises(DemoSetupError, match="was not made by `kvstore demo`"), empty_store(tmp_path):
        pass

    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_file_in_place_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("precious")

    with pytest.raises(DemoSetupError, match="was not made by"), empty_store(tmp_path / "store"):
        pass

    assert (tmp_path / "store").read_text() == "precious"


def test_links_in_the_store_are_removed_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("precious")
    with empty_store(tmp_path / "store") as store:
        (store / "link").symlink_to(target)
    with empty_store(tmp_path / "store") as store:
        assert not (store / "link").exists()

    assert (target / "kept").read_text() == "precious"


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        empty_store(tmp_path / "store"),
        pytest.raises(DemoSetupError, match="another `kvstore demo` is using"),
        empty_store(tmp_path / "store"),
    ):
        pass

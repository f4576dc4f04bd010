"""A model path is turned into name and revision without a network."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvstore.engines.model_files import find_model
from kvstore.fingerprint import fingerprint_weights

COMMIT, OTHER = "c0ffee" + "0" * 34, "beef" + "1" * 36


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with one download."""
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--model"
    for commit, size in ((COMMIT, 32), (OTHER, 64)):
        weights(repository / "snapshots" / commit, hidden_size=size)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT + "\n")
    (repository / "refs" / "v2").write_text(OTHER)
    return tmp_path / "hub"


def weights(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_folder_is_known_by_its_weights(tmp_path: Path) -> None:
    folder = weights(tmp_path / "mine", hidden_size=8)
    found = find_model(str(folder))
    assert (found.is_local, found.revision, found.fields) == (True, fingerprint_weights(folder), {"hidden_size": 8})


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("asked", "commit"), [(None, COMMIT), ("main", COMMIT), ("v2", OTHER), (OTHER, OTHER)])
def test_a_hub_name_is_known_by_its_commit(asked: str | None, commit: str) -> None:
    found = find_model("org/model", asked)
    assert (found.name, found.revision, found.is_local) == ("org/model", commit, False)
    assert found.fields == {"hidden_size": 32 if commit == COMMIT else 64}


def test_a_snapshot_folder_is_the_download(hub: Path) -> None:
    by_path = find_model(str(hub / "models--org--model" / "snapshots" / OTHER))
    assert by_path == find_model("org/model", OTHER)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("path", "asked"), [("org/absent", None), ("org/model", "no-such-branch")])
def test_what_is_not_on_this_machine_is_not_known(path: str, asked: str | None) -> None:
    found = find_model(path, asked)
    assert (found.revision, found.fields) == (None, None)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "here"}, "here"),
        ({"HUGGINGFACE_HUB_CACHE": "here"}, "here"),
        ({"HF_HOME": "home"}, "home/hub"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    weights(tmp_path / place / "models--m" / "snapshots" / COMMIT)
    assert find_model("m", COMMIT).fields == {}


def test_a_folder_without_weights_is_told_and_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert find_model(str(tmp_path)).revision is None
    assert str(tmp_path) in caplog.text
    assert "say the revision yourself" in caplog.text


def test_a_broken_config_json_is_no_config(tmp_path: Path) -> None:
    folder = weights(tmp_path / "mine")
    (folder / "config.json").write_text("[1, 2")
    assert find_model(str(folder)).fields is None

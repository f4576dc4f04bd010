"""Weights and configs are told apart by what they hold, not by where they lie."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstore.fingerprint import fingerprint_config, fingerprint_weights

MIB = 1 << 20


def write(folder: Path, name: str = "model.safetensors", size: int = 3 * MIB, fill: bytes = b"w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_bytes(fill * size)
    return file


def test_a_copy_has_the_fingerprint_of_the_original(tmp_path: Path) -> None:
    write(tmp_path / "a", "model-00001-of-00002.safetensors")
    write(tmp_path / "a", "model-00002-of-00002.safetensors", fill=b"x")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "model-00001-of-00002.safetensors", (1, 1))
    assert fingerprint_weights(tmp_path / "a") == fingerprint_weights(str(tmp_path / "elsewhere"))


def test_a_folder_of_links_is_what_it_links_to(tmp_path: Path) -> None:
    blob = write(tmp_path / "blobs", "0123abcd")
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    write(tmp_path / "plain")
    assert fingerprint_weights(snapshot) == fingerprint_weights(tmp_path / "plain")


@pytest.mark.parametrize("at", [0, 5000, MIB - 1, MIB, 3 * MIB - 1], ids=["first", "head", "head end", "body", "last"])
def test_a_changed_sampled_byte_is_another_model(tmp_path: Path, at: int) -> None:
    file = write(tmp_path / "a")
    before = fingerprint_weights(tmp_path / "a")
    with file.open("r+b") as f:
        f.seek(at)
        f.write(b"!")
    assert fingerprint_weights(tmp_path / "a") != before


def test_every_change_of_a_256th_of_the_bytes_is_seen(tmp_path: Path) -> None:
    """Fine-tuning touches nearly every byte; even a run of 16 KiB in 4 MiB falls into a window."""
    file = write(tmp_path / "a", size=2 * MIB)
    before = fingerprint_weights(tmp_path / "a")
    for start in range(MIB, 2 * MIB - 20_000, 100_000):
        data = bytearray(b"w" * 2 * MIB)
        data[start : start + 20_000] = b"!" * 20_000
        file.write_bytes(data)
        assert fingerprint_weights(tmp_path / "a") != before, start


def test_names_sizes_and_number_of_files_count(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "renamed", "other.safetensors")
    write(tmp_path / "longer", size=3 * MIB + 1)
    write(tmp_path / "two")
    write(tmp_path / "two", "more.safetensors", size=1)
    folders = ("a", "renamed", "longer", "two")
    assert len({fingerprint_weights(tmp_path / name) for name in folders}) == 4


def test_the_same_weights_in_a_second_format_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "a")
    before = fingerprint_weights(tmp_path / "a")
    write(tmp_path / "a", "pytorch_model.bin")
    (tmp_path / "a" / "README.md").write_text("new text")
    assert fingerprint_weights(tmp_path / "a") == before


def test_a_small_file_counts_wholly(tmp_path: Path) -> None:
    file = write(tmp_path / "a", size=100)
    before = fingerprint_weights(tmp_path / "a")
    file.write_bytes(b"w" * 99 + b"!")
    assert fingerprint_weights(tmp_path / "a") != before


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_weights_is_refused_by_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{folder}.*holds no weights.*say the revision"):
        fingerprint_weights(tmp_path / folder)


def test_config_fields_that_cannot_change_kv_are_left_out() -> None:
    base = {"hidden_size": 32, "rope_scaling": {"factor": 2.0}}
    assert fingerprint_config(base | {"transformers_version": "5"}) == fingerprint_config(base)
    assert fingerprint_config(base | {"rope_scaling": {"factor": 4.0}}) != fingerprint_config(base)
    assert fingerprint_config(base | {"unheard_of": 1}) != fingerprint_config(base)

"""Inputs that fuzzing found to break a law; each did before what it found was mended."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import pytest
from kvstore_lmdb.entry import Entry as LmdbEntry
from kvstore_lmdb.guard import GuardSettings, close_guarded, open_guarded
from kvstore_nvme.slot import PAGE_BYTES
from xxhash import xxh3_64_intdigest

from kvstore.config import load_config
from kvstore.errors import ConfigError
from tests.fuzz import seeds
from tests.fuzz.targets import TARGETS

DEEP = 5000

CONFIGS = {
    "arrays in arrays": b"a = " + b"[" * DEEP,
    "tables in tables": b"a = " + b"{a = " * DEEP,
    "a key of many parts": b".".join([b"a"] * DEEP) + b" = 1",
    "a key that takes minutes": b".".join([b"a"] * 120_000) + b" = 1",
    "a key of as many parts as fit a line": b".".join([b"a"] * 250) + b" = 1",
    "a deep option of a backend": b'[[l2]]\nbackend = "memory"\n' + b".".join([b"a"] * 200) + b" = 1",
    "a number of 5,000 digits": b"a = " + b"9" * DEEP,
    "a number that Python does not write": b"[l1]\ncapacity = 0x" + b"f" * DEEP,
    "a duration no float holds": b"[defaults]\ndeadline = " + b"9" * 400,
    "a size beyond decimal": b'[l1]\ncapacity = "' + b"9" * 1_000_010 + b'GiB"',
    "a size that takes half a minute": b'[l1]\ncapacity = "' + b"9" * 900_000 + b'GiB"',
    "a duration beyond decimal": b'[defaults]\ndeadline = "' + b"9" * 200_000 + b'min"',
    "megabytes": b"#" * (2 << 20),
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_config(text: bytes, tmp_path: Path) -> None:
    TARGETS["config"](text)
    path = tmp_path / "kvstore.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"kvstore\.toml"):
        load_config(path)


def test_config_whose_path_no_file_can_have() -> None:
    for path in ("\0", "\ud800"):
        with pytest.raises(ConfigError):
            load_config(path)


def test_config_that_never_ends() -> None:
    with pytest.raises(ConfigError, match="more than"):
        load_config("/dev/zero")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"identity":' * 100_000])
def test_namespace_document_nested_without_end(text: bytes) -> None:
    TARGETS["namespace"](text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 4000,
        b'{"format": 1, "region_bytes": 65536.0, "segment_regions": 4}',
        b'{"format": 1, "region_bytes": 65536, "segment_regions": 1.5}',
        b'{"format": 1, "region_bytes": 65536, "segment_regions": 1e999}',
        b'{"format": 1, "region_bytes": 65536, "segment_regions": true}',
        b'{"fmt": "x", "parts": [["a", [1e999]]]}',
    ],
)
def test_notes_beside_a_store(text: bytes) -> None:
    TARGETS["notes"](text)


@pytest.mark.parametrize(
    "numbers",
    [
        {"codec": 1 << 15},
        {"codec": -2},
        {"nbytes": 1 << 32},
        {"head": 5000},
        {"sequence": (1 << 64) - 1},
        {"generation": 1 << 63},
    ],
)
def test_slot_that_no_index_can_hold(numbers: dict[str, int]) -> None:
    fields = {
        "front": 0,
        "head": 208,
        "nbytes": 4000,
        "generation": 7,
        "sequence": 9,
        "parent": 0,
        "codec": 0,
        **numbers,
    }
    name = b"n" * 49
    header = struct.pack("<4sHHIIQQQQi4x", b"KVS\x01", len(name), 0, *fields.values())
    page = (header + struct.pack("<Q", xxh3_64_intdigest(header + name)) + name).ljust(PAGE_BYTES, b"\0")
    TARGETS["slot"](page)


@pytest.mark.parametrize("n_bytes", [0, 1, 17, 19, 25, 26 + 256])
def test_index_line_of_a_length_that_no_store_format_has(n_bytes: int) -> None:
    """It is read as an empty record: it could stop all eviction otherwise."""
    line = LmdbEntry.parse(b"\xff" * n_bytes)
    assert line.parent == b""
    assert line.info(b"name").payload_bytes >= 0
    TARGETS["lmdb-file"](b"\xff" * n_bytes)


def test_database_that_claims_gigabytes(tmp_path: Path) -> None:
    """90 KiB whose meta pages claim 2 GiB of pages: they are not given the disk space to check them."""
    data = bytearray(next(iter(seeds.lmdb_files())))
    for page in (0, 4096):
        struct.pack_into("<Q", data, page + 32, 1 << 44)
        struct.pack_into("<Q", data, page + 136, (1 << 19) - 1)
    (tmp_path / "data.mdb").write_bytes(data)
    settings = GuardSettings(map_bytes=1 << 20, max_readers=4, max_trees=4)
    close_guarded(open_guarded(tmp_path, settings, logging.getLogger("test")))
    assert all(path.stat().st_size < 1 << 20 for path in tmp_path.rglob("*.mdb*"))


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: " + b"9" * DEEP,
        b"x-amz-meta-kvstore-blocks: " + b"9" * DEEP,
        b"Content-Range: bytes 0-0/" + b"9" * DEEP,
        b"Last-Modified: Sun, 06 Nov 1994 08:49:" + b"9" * 400 + b" GMT",
        b"Last-Modified: Sun, 06 Nov 1994 08:49:" + b"9" * 100 + b" GMT",
        b"Last-Modified: Sun, 06 Nov 0997 08:49:37 GMT",
    ],
)
def test_answer_with_a_number_that_nothing_has(header: bytes) -> None:
    TARGETS["answer"](b"HTTP/1.1 200 OK\r\n" + header)

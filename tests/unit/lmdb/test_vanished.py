"""Records that another program took away while their lines in the index stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.types import Presence
from tests.unit.lmdb.stores import LmdbBackend, Opener, PutStatus, bytes_of, call, item_of, name_of, put, read

TAKE = """
import sys, lmdb
environment = lmdb.open(sys.argv[1], max_dbs=8, map_size=64 << 30, create=False)
records = environment.open_db(b"records", create=False)
with environment.begin(write=True) as txn:
    assert txn.delete(bytes.fromhex(sys.argv[2]), db=records)
environment.close()
"""


@pytest.fixture
def robbed(opener: Opener, tmp_path: Path) -> LmdbBackend:
    """Two records, of which another process has taken the first away."""
    backend = opener()
    put(backend, item_of(1), item_of(2))
    subprocess.run([sys.executable, "-c", TAKE, str(tmp_path / "store"), name_of(1).hex()], check=True, timeout=60)
    return backend


def test_what_is_not_there_is_not_advertised(robbed: LmdbBackend) -> None:
    assert robbed.exists_many([name_of(1), name_of(2)], call()) == [Presence.ABSENT, Presence.PRESENT]


def test_it_can_be_stored_again_and_counts_once(robbed: LmdbBackend) -> None:
    assert put(robbed, item_of(1)) == [PutStatus.STORED]
    assert read(robbed, [name_of(1)]) == [bytes_of(1, 5000)]
    assert robbed.usage().records == 2


def test_a_read_that_finds_nothing_has_the_line_removed(robbed: LmdbBackend) -> None:
    assert read(robbed, [name_of(1)]) == [None]
    robbed.maintain()
    assert robbed.usage().records == 1
    assert [info.name for info in robbed.scan()] == [name_of(2)]

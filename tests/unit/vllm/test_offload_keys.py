"""Offload keys name the same blocks as the hashes in them, in whatever pieces vLLM asks for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvstore_vllm.observing import KnownBlocks
from kvstore_vllm.offload_keys import OffloadKeys

from kvstore import KeyMismatchError, KVCacheKey
from tests.unit.vllm.support import offload_key, offload_keys, request


def make(salt: str | None = None, known: KnownBlocks | None = None) -> OffloadKeys:
    return OffloadKeys(block_tokens=16, group_tokens=(16, 32), known=known or KnownBlocks(), salt=salt)


def plain(keys: list[bytes], *, group: int = 0, salt: str | None = None) -> KVCacheKey:
    """The key that a program makes which knows the hashes only."""
    return KVCacheKey.from_block_hashes(
        [key[:-4] for key in keys], block_tokens=16, chained=True, group=group, salt=salt
    )


def test_digests_are_those_of_the_hashes_alone() -> None:
    keys = offload_keys(5)
    for context in (request(keys), request(), SimpleNamespace(), None):
        (run,) = make().runs(keys, context)
        assert run.indices == [0, 1, 2, 3, 4]
        assert run.key.digests == plain(keys).digests


def test_places_are_passed_on_where_vllm_tells_them() -> None:
    keys = offload_keys(5)
    (run,) = make().runs(keys[2:4], request(keys))
    assert run.key.position_known
    assert run.key.start_block == 2
    assert run.key.digests == plain(keys[2:4]).digests
    (unknown,) = make().runs(keys[2:4], request())
    assert not unknown.key.position_known


def test_holes_and_disorder_are_cut_into_runs() -> None:
    keys = offload_keys(6)
    runs = make().runs([keys[4], keys[0], keys[1], keys[5]], request(keys))
    assert [(run.key.start_block, run.indices) for run in runs] == [(0, [1, 2]), (4, [0, 3])]
    assert [run.key.digests for run in runs] == [plain(keys[:2]).digests, plain(keys[4:]).digests]


def test_kv_groups_are_apart() -> None:
    keys = [offload_key(7, group) for group in (0, 1)]
    runs = make().runs(keys, None)
    assert [run.key.group for run in runs] == [0, 1]
    assert runs[0].key.digests != runs[1].key.digests
    assert runs[1].key.digests == plain([keys[1]], group=1).digests


def test_a_place_that_is_no_chunk_of_its_group_is_not_used() -> None:
    keys = offload_keys(3, group=1)
    (run,) = make().runs(keys, request(keys, tokens=16))  # chunks of group 1 have 32 tokens
    assert not run.key.position_known
    assert run.key.digests == plain(keys, group=1).digests


def test_a_sequence_with_an_unknown_block_has_no_places() -> None:
    keys = offload_keys(4)
    context = request(keys)
    del context._offload_key_positions[keys[1]]
    (run,) = make().runs(keys[2:], context)
    assert not run.key.position_known


def test_a_sequence_that_grew_is_seen_whole() -> None:
    keys = offload_keys(8)
    maker = make()
    (first,) = maker.runs(keys[:3], request(keys[:3]))
    (more,) = maker.runs(keys[3:], request(keys))
    assert (first.key.start_block, more.key.start_block) == (0, 3)
    assert more.key.digests == plain(keys[3:]).digests


def test_a_salt_separates_and_a_parting_changes_it() -> None:
    keys = offload_keys(2)
    salted = make(salt="tenant")
    assert salted.runs(keys, None)[0].key.digests == plain(keys, salt="tenant").digests
    for maker in (salted, make()):
        before = maker.runs(keys, None)[0].key.digests
        maker.part("new")
        assert maker.runs(keys, None)[0].key.digests != before


def test_blocks_are_told_by_the_name_vllm_gives_them() -> None:
    known = KnownBlocks(limit=3)
    keys = offload_keys(4)
    (run,) = make(known=known).runs(keys, request(keys))
    assert known.of(run.key.digests) == keys[1:]  # the oldest is forgotten
    assert known.of([b"unheard of"]) == []


def test_a_key_without_a_hash_is_refused() -> None:
    with pytest.raises(KeyMismatchError, match="no block hash"):
        make().runs([b"\0\0\0\0"], None)

"""LMCache's keys as kvstore keys: nothing that tells chunks apart is lost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_lmcache.memory import bytes_of, layout_of, name_of_key, name_of_object
from kvstore_lmcache.names import ChunkName, batches, key_of

CHUNK = ChunkName(chunk_hash=0x1F, model="m", part=(8, 3, "bfloat16"), salt=None)


def digest(name: ChunkName) -> bytes:
    return key_of([name], 256).digests[0]


def engine_key(**fields: Any) -> Any:
    known = {
        "model_name": "m",
        "world_size": 8,
        "worker_id": 3,
        "chunk_hash": 31,
        "dtype": torch.bfloat16,
        "tags": None,
    }
    return SimpleNamespace(**(known | fields))


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_hash": 0x20},
        {"chunk_hash": b"\x1f"},
        {"chunk_hash": -0x1F},
        {"model": "n"},
        {"part": (8, 2, "bfloat16")},
        {"part": (8, 3, "float16")},
        {"part": (8, 3, "bfloat16", "layer 0")},
        {"salt": "tenant"},
        {"group": 1},
    ],
)
def test_chunks_that_differ_in_anything_have_different_digests(change: dict[str, Any]) -> None:
    assert digest(replace(CHUNK, **change)) != digest(CHUNK)


def test_a_chunk_has_one_digest_whatever_it_is_asked_with() -> None:
    other = replace(CHUNK, chunk_hash=77)

    assert key_of([other, CHUNK], 256).digests == (digest(other), digest(CHUNK))


def test_long_hashes_are_not_shortened() -> None:
    long = b"\x01" * 32

    assert digest(replace(CHUNK, chunk_hash=long)) != digest(replace(CHUNK, chunk_hash=long[:31] + b"\x02"))


def test_chunks_are_asked_together_as_far_as_salt_and_group_agree() -> None:
    chunks = [CHUNK, replace(CHUNK, salt="a"), replace(CHUNK, chunk_hash=2), replace(CHUNK, group=1)]

    assert batches(chunks) == [[0, 2], [1], [3]]


def test_a_key_of_the_engine_is_named_by_all_of_its_fields() -> None:
    assert name_of_key(engine_key()) == CHUNK
    assert name_of_key(engine_key(layer_id=5)).part == (8, 3, "bfloat16", "layer 5")
    assert name_of_key(engine_key(tags=(("user", "a"),))).salt != name_of_key(engine_key(tags=(("user", "b"),))).salt


def test_an_object_of_the_server_is_named_by_all_of_its_fields() -> None:
    key = SimpleNamespace(model_name="m", kv_rank=0x08030803, chunk_hash=b"\x01", object_group_id=2, cache_salt="")

    name = name_of_object(key)

    assert name == ChunkName(chunk_hash=b"\x01", model="m", part=(0x08030803,), salt=None, group=2)


def memory_object(tensor: torch.Tensor | None, size: int, **meta: Any) -> Any:
    known = {"fmt": SimpleNamespace(name="KV_2LTD"), "shape": torch.Size([2, 4]), "dtype": torch.bfloat16}
    metadata = SimpleNamespace(**(known | {"shapes": None, "dtypes": None} | meta))
    return SimpleNamespace(raw_tensor=tensor, get_size=lambda: size, metadata=metadata)


def test_the_bytes_of_an_object_are_those_in_use() -> None:
    memory = torch.arange(32, dtype=torch.uint8)

    seen = bytes_of(memory_object(memory, 16))

    assert seen.tolist() == list(range(16))
    assert seen.data_ptr() == memory.data_ptr()


def test_an_object_without_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="has no tensor"):
        bytes_of(memory_object(None, 4))


def test_the_layout_of_an_object_follows_its_metadata() -> None:
    one = memory_object(torch.zeros(16, dtype=torch.uint8), 16)
    two = memory_object(
        torch.zeros(16, dtype=torch.uint8), 6, shapes=[(1, 2), (2,)], dtypes=[torch.bfloat16, torch.int8]
    )
    narrowed = memory_object(torch.zeros(16, dtype=torch.uint8), 5)

    assert layout_of(one).parts == (("bfloat16", (2, 4)),)
    assert layout_of(two).parts == (("bfloat16", (1, 2)), ("int8", (2,)))
    assert layout_of(narrowed).parts == (("uint8", (5,)),)

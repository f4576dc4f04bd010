"""Configs of one or several tiers on real media, filled through a cache, for the commands that move and repair."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.backend import Backend, Capability, PutItem
from kvstore.cli.main import main
from kvstore.cli.store import Named, one_site
from kvstore.l2.names import name_prefix
from kvstore.types import Call, PutStatus
from tests.support import blocks_of, same_bytes

SPEC = BlockSpec(layers=4, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")
NAMESPACE = Namespace(model="some/model", revision="r1")
DIGEST = NAMESPACE.digest(SPEC)
KEY = KVCacheKey.from_tokens(range(16 * 40), block_tokens=16)
BRANCH = KVCacheKey.from_tokens([*range(16 * 24), *range(50_000, 50_000 + 16 * 19)], block_tokens=16)
"""Leaves KEY in the middle of a pack."""


RECORDS = 40 + 19
"""Blocks of both, each counted once."""

MakeConfig = Callable[..., Path]


def write_config(path: Path, *tiers: dict[str, Any], defaults: str = "") -> Path:
    """A config without L1, so that a get shows what the tiers have."""
    lines = ["[l1]", "enabled = false", "[defaults]", defaults]
    for tier in tiers:
        lines += ["[[l2]]", *(f"{name} = {json.dumps(value)}" for name, value in tier.items())]
    path.write_text("\n".join(lines))
    return path


def blocks() -> torch.Tensor:
    return blocks_of(SPEC, len(KEY))


def branch_blocks() -> torch.Tensor:
    """What BRANCH holds: KEY's blocks as far as they are one sequence."""
    own = blocks_of(SPEC, len(BRANCH), seed=1)
    own[:24] = blocks()[:24]
    return own


def fill(config: Path, namespace: Namespace = NAMESPACE) -> None:
    """Put two sequences that share their beginning; 59 blocks."""
    with KVCache.open(config, spec=SPEC, namespace=namespace) as cache:
        for key, values in ((KEY, blocks()), (BRANCH, branch_blocks())):
            assert cache.put(key, values) == len(key)
            cache.flush(30)


def delivered(config: Path, key: KVCacheKey, values: torch.Tensor, namespace: Namespace = NAMESPACE) -> int:
    """How many leading blocks a cache gives; whatever it gives must be right to the bit."""
    with KVCache.open(config, spec=SPEC, namespace=namespace) as cache:
        out = torch.zeros((len(key), *SPEC.shape), dtype=torch.bfloat16)
        n = cache.get(key, out)
    assert same_bytes(out[:n], values[:n])
    assert not out[n:].view(torch.uint8).any()
    return n


def assert_all_delivered(config: Path, namespace: Namespace = NAMESPACE) -> None:
    assert delivered(config, KEY, blocks(), namespace) == len(KEY)
    assert delivered(config, BRANCH, branch_blocks(), namespace) == len(BRANCH)


@contextmanager
def backend_of(config: Path, tier: str | None = None) -> Iterator[Backend]:
    """A tier's backend, open for writing."""
    with one_site(Named(str(config), None, tier), "--tier").opened(read_only=False) as store:
        yield store.backend


def name_of(backend: Backend, i: int, key: KVCacheKey = KEY) -> bytes:
    """Where a block of a key is stored."""
    return name_prefix(DIGEST, backend.epoch(DIGEST)) + bytes([key.kind]) + key.digests[i]


def read(backend: Backend, name: bytes) -> bytes:
    found: list[bytes] = []
    backend.get_many([name], lambda _, view: found.append(bytes(view)), Call.within(10))
    return b"".join(found)


def read_listed(backend: Backend, i: int) -> bytes:
    """A block of KEY, also out of a pack, which a backend finds after a listing."""
    assert list(backend.scan())
    return read(backend, name_of(backend, i))


def damage(config: Path, i: int, at: int) -> bytes:
    """Change one bit of block ``i`` of KEY where it is stored; returns the stored bytes."""
    with backend_of(config) as backend:
        record = bytearray(read_listed(backend, i))
        packed = Capability.PACKS in backend.capabilities
    record[at] ^= 0x40
    if packed:
        damage_files(Path(tomllib.loads(config.read_text())["l2"][0]["path"]), bytes(record), at)
        return bytes(record)
    with backend_of(config) as backend:
        name = name_of(backend, i)
        backend.delete_many([name], Call.within(10))
        item = PutItem(name, [bytes(record[:192]), bytes(record[192:])])
        assert backend.put_many([item], Call.within(10)) == [PutStatus.STORED]
    return bytes(record)


def damage_files(folder: Path, damaged: bytes, at: int) -> None:
    """Write a damaged record over the sound one, in every pack that holds it."""
    sound = bytearray(damaged)
    sound[at] ^= 0x40
    found = 0
    for path in folder.rglob("*"):
        if path.is_file() and sound in (data := path.read_bytes()):
            path.write_bytes(data.replace(sound, damaged))
            found += 1
    assert found


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    """Run a command with ``--json``, check its exit code, return what it printed."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)

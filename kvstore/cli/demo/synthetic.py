"""The demo without a model: generated blocks, stored by one process and restored by another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.demo.facts import Check
from kvstore.cli.demo.hashing import tensor_sha256
from kvstore.cli.demo.store import CODEC, store_config, tier_folder
from kvstore.cli.output import plural, ratio, size
from kvstore.keys import KVCacheKey
from kvstore.namespace import Namespace
from kvstore.spec import BlockSpec

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]

N_BLOCKS: Final = 64
SPEC: Final = BlockSpec(layers=16, kv_heads=8, head_dim=128, block_tokens=32, dtype="bfloat16")  # 2 MiB
_NAMESPACE: Final = Namespace(model="kvstore-demo-synthetic", revision="1")
_SEED: Final = 20_240_229
_FLUSH_TIMEOUT_S: Final = 120.0


def key(n_blocks: int) -> KVCacheKey:
    """The key of the generated blocks."""
    return KVCacheKey.from_tokens(range(n_blocks * SPEC.block_tokens), block_tokens=SPEC.block_tokens)


def generate(n_blocks: int) -> torch.Tensor:
    """Blocks whose exponents spread as those of real K/V do: a scale of its own per layer and channel.

    Returns:
        (n_blocks, *SPEC.shape) bfloat16; the same in every process.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    scales = torch.empty((1, SPEC.layers, 2, 1, SPEC.kv_heads, SPEC.head_dim)).log_normal_(
        0.0, 0.8, generator=generator
    )
    blocks = torch.empty((n_blocks, *SPEC.shape), dtype=torch.bfloat16)
    for block in blocks:
        block.copy_(torch.randn(SPEC.shape, generator=generator) * scales[0])
    return blocks


def put(folder: Path, n_blocks: int, say: Say) -> dict[str, Any]:
    """Store the blocks and wait until they are on the medium."""
    from kvstore.cache import KVCache

    say(f"generating {plural(n_blocks, 'block')}")
    blocks = generate(n_blocks)
    say("storing")
    with KVCache.open(store_config(folder), spec=SPEC, namespace=_NAMESPACE) as cache:
        start_s = time.perf_counter()
        accepted = cache.put(key(n_blocks), blocks)
        cache.flush(_FLUSH_TIMEOUT_S)
        seconds = time.perf_counter() - start_s
        counters = cache.stats().tiers[0].counters
    return {
        "pid": os.getpid(),
        "accepted": accepted,
        "seconds": seconds,
        "memcpy_s": _memcpy_s(blocks),
        "raw_bytes": counters.stored_raw_bytes,
        "stored_bytes": counters.stored_bytes,
        "path": str(tier_folder(folder)),
        "sha256": tensor_sha256(blocks),
    }


def restore(folder: Path, n_blocks: int, say: Say) -> dict[str, Any]:
    """Restore the blocks into fresh memory."""
    import torch

    from kvstore.cache import KVCache

    say("restoring")
    # Touched beforehand, as a serving engine's buffers are: page faults are not what is measured.
    out = torch.zeros((n_blocks, *SPEC.shape), dtype=torch.bfloat16)
    with KVCache.open(store_config(folder), spec=SPEC, namespace=_NAMESPACE) as cache:
        start_s = time.perf_counter()
        restored = cache.get(key(n_blocks), out)
        seconds = time.perf_counter() - start_s
    return {
        "pid": os.getpid(),
        "restored": restored,
        "seconds": seconds,
        "memcpy_s": _memcpy_s(out),
        "raw_bytes": restored * SPEC.nbytes,
        "sha256": tensor_sha256(out),
    }


def verdict(put_facts: dict[str, Any], restored: dict[str, Any]) -> list[Check]:
    """What must hold for the synthetic demo to be green."""
    n_blocks = put_facts["accepted"]
    return [
        Check("new process", put_facts["pid"] != restored["pid"], f"{put_facts['pid']}, then {restored['pid']}"),
        Check("restored", restored["restored"] == n_blocks == N_BLOCKS, f"{restored['restored']} of {N_BLOCKS} blocks"),
        Check("bit-identical", put_facts["sha256"] == restored["sha256"], f"sha256 {restored['sha256'][:16]}"),
    ]


def synthetic_lines(put_facts: dict[str, Any], restored: dict[str, Any]) -> list[str]:
    """The report as lines of plain text."""
    raw, stored = put_facts["raw_bytes"], put_facts["stored_bytes"]
    lines = [
        f"Stored:   {size(raw)} raw, {size(stored)} stored (codec {CODEC}, {ratio(raw, stored)}x)",
        f"Where:    {put_facts['path']} (LMDB)",
        _speed("put", put_facts, "until it is on the medium"),
        _speed("restore", restored, "read, verified, decoded"),
        "",
    ]
    checks = verdict(put_facts, restored)
    return [*lines, *(f"{check.name + ':':<18}{'yes' if check.passed else 'NO'}  ({check.detail})" for check in checks)]


def _speed(name: str, facts: dict[str, Any], what: str) -> str:
    rate = facts["raw_bytes"] / facts["seconds"] / 1e9
    copy_rate = facts["raw_bytes"] / facts["memcpy_s"] / 1e9
    copied = f"np.copyto of the same blocks {copy_rate:.2f} GB/s ({rate / copy_rate:.2f})"
    return f"{name + ':':<10}{rate:.2f} GB/s, {what}; {copied}"


def _memcpy_s(blocks: torch.Tensor) -> float:
    """Seconds for np.copyto of the blocks into other memory, best of three."""
    import numpy as np
    import torch

    source = blocks.view(torch.uint8).numpy()
    target = np.zeros_like(source)
    seconds = []
    for _ in range(3):
        start_s = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)

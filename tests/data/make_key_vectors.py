"""Write ``key_vectors.json``: keys and namespaces with the exact bytes that name them.

Stored blocks are found by these bytes for as long as they exist.  Run this only to add vectors, or
after raising ``KEY_SCHEME_VERSION``; a diff in a line that was there before loses every stored block.

    python tests/data/make_key_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvstore.keys import KEY_SCHEME_VERSION, BlockExtra, KVCacheKey
from kvstore.namespace import Namespace
from kvstore.spec import BlockSpec

TOKENS = [5, 0, 4294967295, 65, 321, 2147483713, 7, 7, 128000, 9, 10, 11, 12, 13, 14, 15, 16]
HASHES = [{"hex": "00" * 32}, {"hex": "ff" * 32}, {"hex": "61"}, {"hex": "6162"}]
MIXED = ["61", "a", {"hex": "61"}, 61, 0, -1, 255, 18446744073709551616, "é", "e\u0301", ""]
IMAGE = {"block": 1, "value": {"hex": "aa" * 32}, "offset": 0}

# method, arguments, and optionally coarsen: k
KEYS: list[dict[str, Any]] = [
    {"tokens": [], "block_tokens": 4},
    {"tokens": TOKENS, "block_tokens": 4},
    {"tokens": TOKENS, "block_tokens": 1},
    {"tokens": TOKENS, "block_tokens": 16},
    {"tokens": TOKENS, "block_tokens": 17},
    {"tokens": list(range(1000, 1512)), "block_tokens": 256},
    {"tokens": TOKENS, "block_tokens": 4, "salt": "tenant-a"},
    {"tokens": TOKENS, "block_tokens": 4, "salt": {"hex": b"tenant-a".hex()}},
    {"tokens": TOKENS, "block_tokens": 4, "adapter": "tenant-a"},
    {"tokens": TOKENS, "block_tokens": 4, "salt": "org_1", "adapter": "2345"},
    {"tokens": TOKENS, "block_tokens": 4, "salt": "org_12345"},
    {"tokens": TOKENS, "block_tokens": 4, "salt": "é\0🔑"},
    {"tokens": TOKENS, "block_tokens": 4, "group": 3},
    {"tokens": TOKENS[4:], "block_tokens": 4, "prefix": TOKENS[:4]},
    {
        "tokens": TOKENS[8:],
        "block_tokens": 4,
        "prefix": TOKENS[:8],
        "salt": "s",
        "adapter": "lora@1",
        "group": 4294967295,
    },
    {"tokens": TOKENS, "block_tokens": 4, "extra": [IMAGE]},
    {"tokens": TOKENS, "block_tokens": 4, "extra": [IMAGE, {"block": 1, "value": "b", "offset": 3}]},
    {
        "tokens": TOKENS,
        "block_tokens": 4,
        "extra": [{"block": 0, "value": 1, "offset": -2}, {"block": 3, "value": "", "offset": 0}],
    },
    {"tokens": TOKENS, "block_tokens": 4, "coarsen": 2},
    {"tokens": TOKENS, "block_tokens": 1, "coarsen": 16},
    {"tokens": TOKENS[8:], "block_tokens": 2, "prefix": TOKENS[:8], "coarsen": 4},
    {"hashes": [], "block_tokens": 16, "chained": True},
    {"hashes": HASHES, "block_tokens": 16, "chained": True},
    {"hashes": HASHES, "block_tokens": 32, "chained": True},
    {"hashes": MIXED, "block_tokens": 16, "chained": True},
    {"hashes": MIXED, "block_tokens": 16, "chained": True, "salt": "s", "adapter": "a", "group": 1},
    {"hashes": HASHES, "block_tokens": 16, "chained": True, "coarsen": 2},
    {"hashes": HASHES, "block_tokens": 16, "chained": False},
    {"hashes": MIXED, "block_tokens": 16, "chained": False},
    {"hashes": HASHES[2:], "block_tokens": 16, "chained": False, "prefix": HASHES[:2]},
    {
        "hashes": HASHES,
        "block_tokens": 16,
        "chained": False,
        "salt": {"hex": "00"},
        "adapter": "a",
        "group": 1,
        "coarsen": 4,
    },
]

SPEC: dict[str, Any] = {"layers": 30, "kv_heads": 3, "head_dim": 64, "block_tokens": 16, "dtype": "bfloat16"}
NAMESPACES: list[dict[str, Any]] = [
    {"model": "smollm2-135m"},
    {"model": "smollm2-135m", "revision": "93efa2f0"},
    {"model": "../../x\0🔑", "revision": "r"},
    {
        "model": "m",
        "revision": "r",
        "text_config": "rope:8",
        "kv_scales": "s",
        "layers": [0, 16],
        "kv_heads": [2, 3],
        "engine_layout": "packed",
        "lossy_codec": 64,
    },
    {"model": "m", "engine": "vllm", "engine_version": "0.32.0", "rank": 1, "world_size": 2, "host": "h"},
    {"model": "m", "engine": "vllm", "engine_version": "0.32.0", "include_engine_version": True},
]


def decode(value: Any) -> Any:
    """JSON value to argument: ``{"hex": ...}`` is bytes."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [decode(item) for item in value] if isinstance(value, list) else value


def make_key(case: dict[str, Any]) -> KVCacheKey:
    """The key that a case describes."""
    arguments = {name: decode(value) for name, value in case.items() if name not in {"coarsen", "extra", "digests"}}
    key: KVCacheKey
    if "tokens" in arguments:
        extra = [BlockExtra(**{name: decode(v) for name, v in e.items()}) for e in case.get("extra", [])]
        key = KVCacheKey.from_tokens(arguments.pop("tokens"), **arguments, extra=extra)
    else:
        key = KVCacheKey.from_block_hashes(arguments.pop("hashes"), **arguments)
    return key.coarsen(case.get("coarsen", 1))


def make_namespace(case: dict[str, Any]) -> Namespace:
    """The namespace that a case describes."""
    arguments: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in case.items() if n != "digest"}
    return Namespace(**arguments)


def main() -> None:
    """Write the file."""
    keys = [json.dumps({**case, "digests": [d.hex() for d in make_key(case)]}) for case in KEYS]
    spec = BlockSpec(**SPEC)
    names = [json.dumps({**case, "digest": make_namespace(case).digest(spec).hex()}) for case in NAMESPACES]
    text = (
        f'{{"key_scheme": {KEY_SCHEME_VERSION},\n"keys": [\n'
        + ",\n".join(keys)
        + f'\n],\n"spec": {json.dumps(SPEC)},\n'
        f'"spec_fingerprint": "{spec.fingerprint().hex()}",\n"namespaces": [\n' + ",\n".join(names) + "\n]}\n"
    )
    Path(__file__).with_name("key_vectors.json").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()

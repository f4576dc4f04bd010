"""Golden vectors: reproduced by kvstore, by a second implementation, and by fresh processes."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.keys import KEY_SCHEME_VERSION
from kvstore.spec import BlockSpec

DATA = Path(__file__).parents[2] / "data"
VECTORS: dict[str, Any] = json.loads((DATA / "key_vectors.json").read_text("ascii"))
MAKER = runpy.run_path(str(DATA / "make_key_vectors.py"))

# --- a second implementation, written from docs/reference/keys.md and sharing no code with kvstore ---


def tag(name: str) -> bytes:
    return name.encode() + bytes(16 - len(name))


def framed(value: Any) -> bytes:
    if value is None:
        kind, payload = 0, b""
    elif isinstance(value, dict):
        kind, payload = 1, bytes.fromhex(value["hex"])
    elif isinstance(value, str):
        kind, payload = 2, value.encode()
    else:
        kind, payload = 3, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return struct.pack("<BQ", kind, len(payload)) + payload


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def expected_digests(case: dict[str, Any]) -> list[str]:
    kind = 1 if "tokens" in case else 2
    alone = bool(case.get("chained", False))
    scope = [1, kind, int(alone), case["block_tokens"], case.get("group", 0), case.get("salt"), case.get("adapter")]
    seed = sha(tag("kvstore/seed"), *map(framed, scope))
    prefix = case.get("prefix", [])
    digests: list[bytes] = []
    before = seed
    if kind == 1:
        n, ids = case["block_tokens"], prefix + case["tokens"]
        for i in range(len(ids) // n):
            words = struct.pack(f"<{n}I", *ids[i * n : (i + 1) * n])
            extra = b"".join(framed(e["offset"]) + framed(e["value"]) for e in case.get("extra", []) if e["block"] == i)
            before = sha(tag("kvstore/tokens+x" if extra else "kvstore/tokens"), before, words, extra)
            digests.append(before)
        digests = digests[len(prefix) // n :]
    else:
        for value in prefix + case["hashes"]:
            before = sha(tag("kvstore/alone" if alone else "kvstore/hashes"), seed if alone else before, framed(value))
            digests.append(before)
        digests = digests[len(prefix) :]
    k = case.get("coarsen", 1)
    if k > 1:
        digests = [sha(tag("kvstore/coarse"), framed(k), d) for d in digests[k - 1 :: k]]
    return [d.hex() for d in digests]


def expected_namespace(case: dict[str, Any], fingerprint: str) -> str:
    names = [
        "model",
        "revision",
        "text_config",
        "kv_scales",
        "layers",
        "kv_heads",
        "engine_layout",
        "lossy_codec",
        "key_scheme",
    ]
    if case.get("include_engine_version"):
        names += ["engine", "engine_version"]
    parts = [tag("kvstore/ns"), framed({"hex": fingerprint})]
    for name in names:
        value = {"key_scheme": 1, **case}.get(name)
        if value is not None:
            parts += [framed(name), *map(framed, value if isinstance(value, list) else [value])]
    return sha(*parts)[:16].hex()


# --- the laws ---


def test_vectors_belong_to_this_key_scheme() -> None:
    assert VECTORS["key_scheme"] == KEY_SCHEME_VERSION == 1
    assert len(VECTORS["keys"]) >= 20


@pytest.mark.parametrize("case", VECTORS["keys"], ids=range(len(VECTORS["keys"])))
def test_key_has_its_golden_digests(case: dict[str, Any]) -> None:
    key = MAKER["make_key"](case)

    assert [d.hex() for d in key] == case["digests"]
    assert key.kind == (1 if "tokens" in case else 2)


@pytest.mark.parametrize("case", VECTORS["keys"], ids=range(len(VECTORS["keys"])))
def test_second_implementation_agrees_with_golden_digests(case: dict[str, Any]) -> None:
    assert expected_digests(case) == case["digests"]


@pytest.mark.parametrize("case", VECTORS["namespaces"], ids=range(len(VECTORS["namespaces"])))
def test_namespace_has_its_golden_digest(case: dict[str, Any]) -> None:
    spec = BlockSpec(**VECTORS["spec"])

    assert spec.fingerprint().hex() == VECTORS["spec_fingerprint"]
    assert MAKER["make_namespace"](case).digest(spec).hex() == case["digest"]
    assert expected_namespace(case, VECTORS["spec_fingerprint"]) == case["digest"]


def test_golden_keys_end_in_different_digests() -> None:
    # Cases with a prefix continue another case's sequence on purpose.
    last = [case["digests"][-1] for case in VECTORS["keys"] if "prefix" not in case and case["digests"]]

    assert len(set(last)) == len(last)


def test_maker_writes_the_committed_file(tmp_path: Path) -> None:
    script = tmp_path / "make_key_vectors.py"
    script.write_text((DATA / "make_key_vectors.py").read_text())

    runpy.run_path(str(script), run_name="__main__")

    assert (tmp_path / "key_vectors.json").read_bytes() == (DATA / "key_vectors.json").read_bytes()


_PRINT_ALL = """
import json, runpy, sys
maker = runpy.run_path(sys.argv[1])
print(json.dumps([[d.hex() for d in maker["make_key"](case)] for case in maker["KEYS"]]))
assert "numpy" not in sys.modules and "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("hash_seed", "flags", "locale"),
    [(None, [], "C"), ("0", [], "C.UTF-8"), ("1", ["-O"], "tr_TR"), ("random", ["-X", "utf8=0"], "POSIX")],
)
def test_fresh_process_names_the_same_blocks(
    tmp_path: Path, hash_seed: str | None, flags: list[str], locale: str
) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | {"LC_ALL": locale, "TZ": "Asia/Tokyo"}
    if hash_seed is not None:
        env["PYTHONHASHSEED"] = hash_seed

    out = subprocess.run(
        [sys.executable, *flags, "-c", _PRINT_ALL, str(DATA / "make_key_vectors.py")],
        env=env,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )

    assert json.loads(out.stdout) == [case["digests"] for case in VECTORS["keys"]]

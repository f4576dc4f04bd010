"""A process that looks for chunks through both of LMCache's doors; a program of its own.

``python -m tests.engines.lmcache.process`` with the kvstore config as JSON on standard input prints
the SHA-256 of each chunk that was delivered, or null, for the connector and for the adapter.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

HASHES = (1, 2, 3)
SHORT_TOKENS = 7
PARTIAL = (("save_unfull_chunk", True),)


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def load_by_connector(config: dict[str, Any]) -> list[str | None]:
    """What the in-process engine's remote backend delivers."""
    from tests.engines.lmcache.engine import Engine

    engine = Engine(config=config, lmcache=PARTIAL)
    keys = engine.keys(*HASHES)
    leading = engine.backend.batched_contains(keys)
    found = engine.get(keys)
    engine.stop()
    return [None if data is None else digest(data) for data in found[:leading]]


def load_by_adapter(config: dict[str, Any]) -> list[str | None]:
    """What the server's adapter delivers."""
    from tests.engines.lmcache.adapter import Server, keys, memory

    server = Server(config=config)
    there = [keys(*HASHES)[i] for i in server.look_up(keys(*HASHES))]
    objects = [memory() for _ in there]
    loaded = server.load(there, objects)
    server.adapter.close()
    return [digest(bytes(one.byte_array)) if i in loaded else None for i, one in enumerate(objects)]


def main() -> None:
    """Look through both doors."""
    config = json.load(sys.stdin)
    sys.stdout.write(json.dumps([load_by_connector(config), load_by_adapter(config)]))
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    main()

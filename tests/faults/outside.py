"""A process of its own that opens an LMDB database as any program could; one JSON request a line.

It imports nothing of the project: what it finds is what lies in the file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lmdb


def answer(env: lmdb.Environment, request: dict[str, Any]) -> Any:
    records = env.open_db(b"records", create=False)
    name = bytes.fromhex(request.get("name", ""))
    with env.begin(db=records, write=request["do"] in {"write", "remove"}) as txn:
        if request["do"] == "names":
            return [key.hex() for key in txn.cursor().iternext(keys=True, values=False)]
        if request["do"] == "read":
            value = txn.get(name)
            return None if value is None else value.hex()
        if request["do"] == "write":
            return txn.put(name, bytes.fromhex(request["value"]))
        return txn.delete(name)


def main(path: str) -> None:
    for line in sys.stdin:
        # opened for each request, so that the database may be closed and replaced in between
        with lmdb.open(path, max_dbs=8, map_size=32 << 30, max_readers=1024, create=False) as env:
            print(json.dumps(answer(env, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

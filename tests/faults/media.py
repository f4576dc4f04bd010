"""The media of the scenarios: how each keeps a value, and how to get at it without the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from kvstore_nvme.slot import PAGE_BYTES, Slot, room_of

from kvstore.objects.naming import holds_records
from tests.faults.s3_faults import S3FaultServer, Stored
from tests.faults.store import MIB, Store
from tests.support_s3 import CREDENTIALS


class LmdbStore(Store):
    """Values of the tree ``records``, reached by a process of its own."""

    kind: ClassVar[str] = "lmdb"
    METADATA: ClassVar = {"data.mdb", "lock.mdb", "kvstore.state", "namespaces"}

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._process: subprocess.Popen[str] | None = None

    def section(self) -> dict[str, Any]:
        return {"backend": "lmdb", "path": str(self.root)}

    def places(self) -> list[bytes]:
        return [bytes.fromhex(name) for name in self._ask(do="names")]

    def find(self, digest: bytes) -> bytes | None:
        return next((name for name in self.places() if name.endswith(digest)), None)

    def read(self, place: bytes) -> bytes:
        return bytes.fromhex(self._ask(do="read", name=place.hex()))

    def write(self, place: bytes, value: bytes) -> None:
        self._ask(do="write", name=place.hex(), value=value.hex())

    def remove(self, place: bytes) -> None:
        assert self._ask(do="remove", name=place.hex())

    def bound(self, capacity_bytes: int) -> int:
        return capacity_bytes * 5 // 4 + MIB

    def strangers(self) -> list[str]:
        return [p.name for p in self.root.iterdir() if p.name not in self.METADATA and ".corrupt-" not in p.name]

    def _ask(self, **request: str) -> Any:
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("outside.py")), str(self.root)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate(timeout=10)


class NvmeStore(Store):
    """Slots of the segment files: header and name of a slot, then the record, wherever the newest one lies."""

    kind: ClassVar[str] = "nvme"

    METADATA: ClassVar = {"index", "kvstore.nvme", "kvstore.regions", "kvstore.epochs", "namespaces"}

    def section(self) -> dict[str, Any]:
        return {"backend": "nvme", "path": str(self.root)}

    def strangers(self) -> list[str]:
        return [p.name for p in self.root.iterdir() if p.name not in self.METADATA and not p.name.startswith("seg-")]

    def places(self) -> list[tuple[str, int]]:
        newest: dict[bytes, tuple[int, tuple[str, int]]] = {}
        for path in sorted(self.root.glob("seg-*")):
            data = path.read_bytes()
            for at in range(0, len(data), PAGE_BYTES):
                slot = Slot.parse(memoryview(data)[at : at + PAGE_BYTES])
                if slot is not None and slot.sequence > newest.get(slot.name, (-1, None))[0]:
                    newest[slot.name] = (slot.sequence, (str(path), at))
        return [place for _, place in newest.values()]

    def find(self, digest: bytes) -> tuple[str, int] | None:
        return next((place for place in self.places() if self._slot(place).name.endswith(digest)), None)

    def read(self, place: tuple[str, int]) -> bytes:
        slot = self._slot(place)
        with Path(place[0]).open("rb") as f:
            f.seek(place[1])
            page = f.read(PAGE_BYTES)
            rest = f.read(slot.rest_bytes)
        return page[: _named(slot)] + page[PAGE_BYTES - slot.front_bytes :] + rest

    def write(self, place: tuple[str, int], value: bytes) -> None:
        slot = self._slot(place)
        record = value[_named(slot) :].ljust(slot.nbytes, b"\0")
        with Path(place[0]).open("r+b") as f:
            f.seek(place[1])
            f.write(value[: _named(slot)])
            f.seek(place[1] + PAGE_BYTES - slot.front_bytes)
            f.write(record[: slot.nbytes])

    def remove(self, place: tuple[str, int]) -> None:
        self.write(place, b"")

    def record_span(self, value: bytes) -> slice:
        slot = Slot.parse(memoryview(value.ljust(PAGE_BYTES, b"\0")))
        assert slot is not None
        return slice(_named(slot), None)

    def resized(self, value: bytes, nbytes: int) -> bytes:
        """A slot has room for its record only; another length is one that its header claims."""
        slot = Slot.parse(memoryview(value.ljust(PAGE_BYTES, b"\0")))
        assert slot is not None
        length = nbytes - _named(slot)
        if length < 0:
            return value[:nbytes]
        page = bytearray(PAGE_BYTES)
        replace(slot, nbytes=length, front_bytes=min(length, slot.front_bytes)).pack_into(memoryview(page))
        return bytes(page[: _named(slot)]) + value[_named(slot) :][:length]

    def _slot(self, place: tuple[str, int]) -> Slot:
        if place not in self._known:
            with Path(place[0]).open("rb") as f:
                f.seek(place[1])
                slot = Slot.parse(memoryview(f.read(PAGE_BYTES)))
            assert slot is not None
            self._known[place] = slot
        return self._known[place]

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._known: dict[tuple[str, int], Slot] = {}


def _named(slot: Slot) -> int:
    """Bytes of a slot's header with its name."""
    return PAGE_BYTES - room_of(len(slot.name))


class ObjectsStore(Store):
    """Objects by key, as the engine for whole objects names them."""

    def alone(self) -> dict[str, Any]:
        return {"pack": 1}

    def find(self, digest: bytes) -> str | None:
        return next((key for key in self.places() if key.endswith(digest.hex())), None)

    @staticmethod
    def known(key: str) -> bool:
        return holds_records(key) or key.startswith(("epochs/", "namespaces/", "drops/"))


class TreeStore(ObjectsStore):
    """Files below one directory."""

    kind: ClassVar[str] = "tree"

    def section(self) -> dict[str, Any]:
        return {"backend": "nvme", "layout": "tree", "path": str(self.root)}

    def places(self) -> list[str]:
        return [key for key in self._keys() if holds_records(key)]

    def read(self, place: str) -> bytes:
        return (self.root / place).read_bytes()

    def write(self, place: str, value: bytes) -> None:
        (self.root / place).write_bytes(value)

    def remove(self, place: str) -> None:
        (self.root / place).unlink()

    def strangers(self) -> list[str]:
        return [key for key in self._keys() if not self.known(key) and key != "format"]

    def _keys(self) -> list[str]:
        return [str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()]


class S3Store(ObjectsStore):
    """Objects of a bucket on a server of its own, reached by plain requests."""

    kind: ClassVar[str] = "s3"
    deadline_s: ClassVar[float] = 2.0
    evicts: ClassVar[bool] = False
    BUCKET: ClassVar[str] = "faults"
    PREFIX: ClassVar[str] = "kvstore"

    def __init__(self, root: Path, url: str = "", server: S3FaultServer | None = None) -> None:
        super().__init__(root)
        self.url = url
        self._server = server

    @classmethod
    def make(cls, root: Path) -> Store:
        server = S3FaultServer(cls.BUCKET)
        server.start()
        return cls(root, server.url, server)

    @property
    def server(self) -> S3FaultServer:
        """The server, in the process that started it."""
        assert self._server is not None
        return self._server

    def section(self) -> dict[str, Any]:
        return {"backend": "s3", "bucket": self.BUCKET, "endpoint_url": self.url, **CREDENTIALS}

    def facts(self) -> dict[str, Any]:
        return {"url": self.url}

    def places(self) -> list[str]:
        return [key for key in self._keys() if holds_records(key)]

    def read(self, place: str) -> bytes:
        return self._objects()[f"{self.PREFIX}/{place}"].body

    def write(self, place: str, value: bytes) -> None:
        self._objects()[f"{self.PREFIX}/{place}"].body = value

    def remove(self, place: str) -> None:
        del self._objects()[f"{self.PREFIX}/{place}"]

    def strangers(self) -> list[str]:
        return [key for key in self._keys() if not self.known(key)]

    def used_bytes(self) -> int:
        return sum(len(stored.body) for stored in self._objects().values())

    def bound(self, capacity_bytes: int) -> int:
        return sys.maxsize

    def _objects(self) -> MutableMapping[str, Stored]:
        return self.server.buckets[self.BUCKET]

    def _keys(self) -> list[str]:
        return [key.removeprefix(f"{self.PREFIX}/") for key in self._objects()]

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


def server_of(store: Store) -> S3FaultServer:
    """The server of an S3 store that this process made."""
    assert isinstance(store, S3Store)
    return store.server


MEDIA: Final[dict[str, type[Store]]] = {store.kind: store for store in (LmdbStore, NvmeStore, TreeStore, S3Store)}

"""Sound inputs that fuzzing starts from: what the program itself writes."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import lmdb
from kvstore_lmdb.statefile import State
from kvstore_nvme.geometry import Geometry, write_anchor
from kvstore_nvme.slot import PAGE_BYTES, Slot
from xxhash import xxh3_64_digest

from kvstore.backend import PutHint, PutItem
from kvstore.cli.archive import ArchiveWriter, Parcel
from kvstore.namespace import Namespace
from kvstore.objects import pack
from kvstore.record import unpack_head
from kvstore.spec import BlockSpec
from tests.fuzz import reference
from tests.fuzz.worlds import KNOWN, LARGE, WORLDS, sound

SPEC: Final = BlockSpec(layers=2, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")
NAME: Final = bytes(16) + b"\1" + b"d" * 32

CONFIGS: Final = (
    '[l1]\ncapacity = "1GiB"\ndevice = "cpu"\n[defaults]\ndeadline = "500ms"\nrequire_salt = true\n',
    '[[l2]]\nbackend = "memory"\ncapacity = 65536\nadmit = "hot"\nqueue = "1MB"\nworkers = 3\nname = "a"\n',
    '[[l2]]\nbackend = "lmdb"\npath = "/x"\ncodec = "planes"\n[[l2]]\nbackend = "s3"\nbucket = "b"\n',
    '[[l2]]\nbackend = "nvme"\npath = "~/x"\ndurability = "durable"\ndeadline = 1.5\nrequired = false\n',
    'plugins = ["lru"]\nblocked_plugins = ["s3"]\n[l1]\nenabled = false\n[[l2]]\nbackend = "memory"\n',
    '[codecs.aes-gcm]\nkeys = ["2=env:A", "env:B"]\ninner = "zstd"\n[[l2]]\nbackend = "memory"\ncodec = "aes-gcm"\n',
)


def config() -> Iterator[bytes]:
    """Configs with a key of every type."""
    yield from (text.encode() for text in CONFIGS)


def namespace() -> Iterator[bytes]:
    """Documents of namespaces with and without everything."""
    yield Namespace(model="m").to_json(SPEC).encode()
    full = Namespace(model="m", revision="r", layers=(0, 2), kv_heads=(1, 3), lossy_codec=70, rank=1, host="h")
    yield full.to_json(SPEC).encode()


def key_source() -> Iterator[bytes]:
    """One source of each form."""
    yield from (b"env:KEY", b"12=file:/nowhere/key", b"file:~/key", b"4294967296=env:A")


def notes() -> Iterator[bytes]:
    """State file, anchor, epochs and chunk header."""
    yield json.dumps({"version": 1, **asdict(State("clean", "boot", "cache", 1, 2, 3))}).encode()
    with tempfile.TemporaryDirectory() as folder:
        write_anchor(Path(folder), Geometry(1 << 20, 4))
        yield next(Path(folder).iterdir()).read_bytes().rstrip()
    yield b"".join(pair + xxh3_64_digest(pair) for pair in (bytes(24), b"n" * 16 + b"e" * 8))
    yield b'{"fmt":"KV_T2D","parts":[["bfloat16",[2,4,16,8]]]}'


def records() -> Iterator[bytes]:
    """A sound record of each world that is not large, and asking for it."""
    for i in range(len(WORLDS)):
        if i not in LARGE:
            yield bytes((i, 0)) + sound(i).records[KNOWN[0]]


def coded() -> Iterator[bytes]:
    """The first segment of each of those records."""
    codecs = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    for data in records():
        yield bytes((codecs[reference.field(data[2:], "codec")], data[0], 0)) + reference.segments(data[2:])[0]
    yield bytes((4, 0, 1)) + sound(0).blocks[KNOWN[0]]  # to be sealed by the target
    yield bytes((4, 0, 5)) + reference.segments(sound(2).records[KNOWN[0]])[0]


def packs() -> Iterator[bytes]:
    """Packs of one and of three records."""
    found = [sound(i).records[KNOWN[0]] for i in (1, 2, 3)]
    items = [PutItem(bytes([i]) + NAME[1:], [r[:208], r[208:]], head_bytes=208) for i, r in enumerate(found)]
    for some in (items[:1], items):
        yield pack.seal(some) + b"".join(bytes(buffer) for item in some for buffer in item.buffers)


def slots() -> Iterator[bytes]:
    """First pages of a small and of a larger record."""
    for record in (b"tiny", sound(1).records[KNOWN[0]] * 9):
        slot = Slot.of(PutItem(NAME, [record[:208], record[208:]], head_bytes=208, hint=PutHint(parent=b"p" * 49)))
        slot.generation, slot.sequence = 7, 1_700_000_000_000_000
        page = memoryview(bytearray(PAGE_BYTES))
        slot.pack_into(page)
        yield bytes(page).rstrip(b"\0")


def lmdb_files() -> Iterator[bytes]:
    """A database with two trees, overflow pages and free pages."""
    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder, max_dbs=4, map_size=1 << 20) as env:
            trees = {tree: env.open_db(tree) for tree in (b"a", b"b")}
            for tree, db in trees.items():
                with env.begin(write=True, db=db) as txn:
                    txn.put(b"big" + tree, bytes(9000))
                    for i in range(40):
                        txn.put(b"%04d" % i, tree * 90)
            with env.begin(write=True, db=trees[b"b"]) as txn:
                txn.delete(b"bigb")
        yield (Path(folder) / "data.mdb").read_bytes()


def archives() -> Iterator[bytes]:
    """An archive of two records and a description."""
    out = io.BytesIO()
    writer = ArchiveWriter(out)
    writer.document(bytes(16), Namespace(model="m").to_json(SPEC))
    for i in (1, 14):
        record = sound(i).records[KNOWN[0]]
        writer.record(Parcel(1, unpack_head(memoryview(record)), record))
    writer.finish()
    yield out.getvalue()


def keys() -> Iterator[bytes]:
    """Choices that lead into tokens and into hashes."""
    yield from (bytes((i * j + j) % 251 for i in range(160)) for j in (1, 2, 3, 7, 11))


def names() -> Iterator[bytes]:
    """A name of the core and some of others."""
    yield from (bytes(4) + b"\x31" + NAME, b"\x10\0\x20\5\3abc", b"\xff\xff\xff\7\x4fother/ab/" + b"ab" * 32)


def answers() -> Iterator[bytes]:
    """What servers say: an object, a part of one, nothing, a refusal."""
    common = 'Date: Mon, 30 Nov 2026 08:00:00 GMT\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\nETag: "e"\r\n'
    yield f"HTTP/1.1 200 OK\r\n{common}Content-Length: 4096\r\nx-amz-meta-kvstore-blocks: 16".encode()
    yield f"HTTP/1.1 206 Partial\r\n{common}Content-Range: bytes 3-9/4096\r\nContent-Length: 7".encode()
    yield b"HTTP/1.0 404 Not Found\r\nConnection: close\r\nTransfer-Encoding: chunked"
    document = "<Error><Code>SlowDown</Code><Message>m</Message><Region>r</Region></Error>"
    yield f"HTTP/1.1 503 x\r\nContent-Type: application/xml\r\nRetry-After: 1\r\n\r\n{document}".encode()

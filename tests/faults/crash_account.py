"""What lies on a medium against what the store says of itself: nothing may be there that nobody counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lmdb
from kvstore_lmdb.check import FileCheck
from kvstore_lmdb.format import read_meta

from kvstore.objects.naming import holds_records
from kvstore.objects.pack import HEADER, parse_header, parse_index
from tests.faults.store import Store

PATIENCE_S: Final = 3.0  # a sweep of what a dead process left runs beside the first calls


def unaccounted(store: Store, backend: Any) -> str:
    """What does not add up while the backend is open; empty when all is well."""
    law = {"lmdb": _listed, "nvme": _regions, "tree": _files, "s3": _objects}[store.kind]
    return _settled(lambda: law(store, backend))


def unaccounted_when_closed(store: Store) -> str:
    """What does not add up on a medium that nobody has open."""
    odd = _settled(lambda: f"strangers: {store.strangers()}" if store.strangers() else "")
    return odd or (_pages(store) if store.kind == "lmdb" else "")


def _settled(law: Callable[[], str]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (odd := law()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return odd


def _listed(store: Store, backend: Any) -> str:
    """A listing of everything counts as many records as the store says it has."""
    listed, usage = list(backend.scan()), backend.usage()
    bodies = sum(info.head_bytes + info.payload_bytes for info in listed)
    if len(listed) == usage.records and bodies <= usage.payload_bytes:
        return ""
    return f"{len(listed)} records of {bodies} bytes are listed, {usage} is told"


def _pages(store: Store) -> str:
    """Every page of the file is in a tree or free, and the trees agree on the records."""
    fd = os.open(store.root / "data.mdb", os.O_RDONLY)
    try:
        check = FileCheck(fd, read_meta(fd), 30.0)
        check.run()
    finally:
        os.close(fd)
    if leaked := check._used.count(0):
        return f"{leaked} of {len(check._used)} pages are neither used nor free"
    with lmdb.open(str(store.root), max_dbs=8, readonly=True, lock=False) as env, env.begin() as txn:
        trees = [env.open_db(name, txn, create=False) for name in (b"records", b"index", b"recency")]
        entries = [txn.stat(tree)["entries"] for tree in trees]
    return "" if len(set(entries)) == 1 else f"records, index and recency have {entries} entries"


def _regions(store: Store, backend: Any) -> str:
    """Rows of regions, entries of records and the lengths of the files tell the same."""
    inner = backend._chosen._session.store
    with inner.reading() as txn:
        rows = inner.index.rows(txn)
        entries = [entry for _, entry in inner.index.listed(txn, b"", 1 << 30)]
        slots = sum(len(inner.index.in_region(txn, region, 1 << 30)) for region in rows)
    counted = {region: (row.records, row.pages) for region, row in rows.items()}
    found = {
        region: (
            sum(e.region == region for e in entries),
            sum(e.pages for e in entries if e.region == region),
        )
        for region in rows
    }
    lengths, region_bytes = sum(inner.segments.lengths().values()), inner.geometry.region_bytes
    usage = backend.usage()
    if counted != found or slots != len(entries) or usage.records != len(entries):
        return f"rows say {counted}, entries {found}, {slots} slots, {usage}"
    # a region whose owner died before it entered it is the next one to be used
    if not 0 <= lengths - len(rows) * region_bytes <= region_bytes:
        return f"files of {lengths} bytes for {len(rows)} regions of {region_bytes}"
    return ""


def _files(store: Store, backend: Any) -> str:
    records = charged = 0
    for path in store.root.rglob("*"):
        if path.is_file() and holds_records(str(path.relative_to(store.root))):
            nbytes, n = _pack(path)
            records, charged = records + n, charged + -(-nbytes // 4096) * 4096
    usage = backend.usage()
    if (usage.records, usage.payload_bytes) == (records, charged):
        return ""
    return f"files hold {records} records on {charged} bytes, {usage} is told"


def _pack(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    return len(data), parse_header(data, len(data)).records


def _objects(store: Store, backend: Any) -> str:
    """Every object is whole, and each record is listed; packs may overlap, and then it is listed once."""
    names: set[bytes] = set()
    for nbytes, head in store.heads().values():  # type: ignore[attr-defined]
        header = parse_header(head, nbytes)
        names.update(entry.name for entry in parse_index(header, head[HEADER.size : header.records_at]))
    listed = [info.name for info in backend.scan()]
    if sorted(listed) == sorted(names):
        return ""
    return f"objects hold {len(names)} records, {len(listed)} are listed"

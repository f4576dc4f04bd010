"""One file per record, published by a link."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvstore.backend import Backend, BackendContext, Capability, PutItem, Receive, Usage, where
from kvstore.errors import BackendPermissionError, BackendUnavailableError, ClosedError
from kvstore.types import Call, Presence, PutStatus, ReadStatus


class DirFilesBackend(Backend):
    """Keeps a record under the hexadecimal form of its name; never evicts."""

    capabilities: ClassVar[Capability] = Capability.PERSISTENT | Capability.SHARED
    _context: BackendContext | None = None

    def open(self, context: BackendContext) -> None:
        root = Path(context.options.path)
        try:
            if not context.read_only:
                root.mkdir(parents=True, exist_ok=True)
            next(root.iterdir(), None)  # fails now rather than at the first read
        except OSError as e:
            raise BackendUnavailableError(f"tier {context.tier!r}: path = {where(root)!r}: {e.strerror}") from e
        self._context = context

    def close(self) -> None:
        self._context = None

    def _opened(self, *, to_change: bool = False) -> BackendContext:
        if self._context is None:
            raise ClosedError("the dirfiles backend is closed; open it before use")
        if to_change and self._context.read_only:
            raise BackendPermissionError(f"{where(self._context.options.path)} was opened read-only")
        return self._context

    def _file(self, name: bytes, suffix: str = ".rec") -> Path:
        *folders, last = [name[i : i + 100].hex() for i in range(0, len(name), 100)]  # file names end at 255 bytes
        return Path(self._opened().options.path, *folders, last + suffix)

    def _publish(self, path: Path, buffers: Sequence[memoryview | bytes]) -> None:
        durable = self._opened(to_change=True).durability == "durable"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp") as file:
            file.writelines(buffers)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.link(file.name, path)  # one step; fails when another writer was first

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        statuses: list[ReadStatus] = []
        for i, path in enumerate([self._file(name) for name in names]):
            if call.stop() or (call.leading_only and ReadStatus.ABSENT in statuses):
                return statuses + [ReadStatus.SKIPPED] * (len(names) - i)
            try:
                record = path.read_bytes()
            except OSError as e:
                statuses.append(ReadStatus.ABSENT if e.errno == errno.ENOENT else ReadStatus.UNAVAILABLE)
            else:
                receive(i, memoryview(record))
                statuses.append(ReadStatus.OK)
        return statuses

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return [PutStatus.TIMEOUT if call.stop() else self._put(self._file(item.name), item) for item in items]

    def _put(self, path: Path, item: PutItem) -> PutStatus:
        try:
            self._publish(path, item.buffers)
        except BackendPermissionError:
            return PutStatus.READ_ONLY
        except FileExistsError:
            return PutStatus.EXISTS
        except OSError as e:
            return PutStatus.FULL if e.errno == errno.ENOSPC else PutStatus.UNAVAILABLE
        return PutStatus.STORED

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        found = [Presence.PRESENT if self._file(n).exists() else Presence.ABSENT for n in names if not call.stop()]
        return found + [Presence.UNKNOWN] * (len(names) - len(found))

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        self._opened(to_change=True)
        there = [path for path in map(self._file, dict.fromkeys(names)) if not call.stop() and path.exists()]
        for path in there:
            path.unlink(missing_ok=True)
        return len(there)

    def discard(self, name: bytes, header_checksum: int) -> None:
        self._opened(to_change=True)
        with contextlib.suppress(FileNotFoundError):
            record = self._file(name).read_bytes()
            if len(record) < 192 or int.from_bytes(record[184:192], "little") == header_checksum:
                self._file(name).unlink()  # not atomic: a repair in between is lost, which costs one more miss

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        path = self._file(namespace, ".epoch")
        if bump:
            fresh = self._file(os.urandom(16), ".tmp")
            self._publish(fresh, [os.urandom(8)])
            fresh.replace(path)
        elif not path.exists():
            with contextlib.suppress(FileExistsError):  # another process was first
                self._publish(path, [os.urandom(8)])
        return path.read_bytes()

    def usage(self) -> Usage:
        sizes = []
        for path in Path(self._opened().options.path).rglob("*.rec"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                sizes.append(path.stat().st_size)
        return Usage(records=len(sizes), payload_bytes=sum(sizes), file_bytes=sum(sizes))

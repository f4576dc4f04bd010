"""One file per record, published by rename."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvstore.backend import Backend, BackendContext, Capability, PutItem, Receive, Usage, where
from kvstore.errors import BackendUnavailableError, ClosedError
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
            msg = f"tier {context.tier!r}: path = {where(root)!r} cannot be used: {e.strerror}"
            raise BackendUnavailableError(msg) from e
        self._context = context

    def close(self) -> None:
        self._context = None

    def _file(self, name: bytes, suffix: str = ".rec") -> Path:
        text = name.hex()  # file names end at 255 bytes, so long names become folders
        parts = [text[i : i + 200] for i in range(0, len(text), 200)]
        return Path(self._opened().options.path, *parts[:-1], parts[-1] + suffix)

    def _opened(self) -> BackendContext:
        if self._context is None:
            msg = "the dirfiles backend is closed; open it before use"
            raise ClosedError(msg)
        return self._context

    def _publish(self, path: Path, buffers: Sequence[memoryview | bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            file.writelines(buffers)
            file.flush()
            if self._opened().durability == "durable":
                os.fsync(file.fileno())
            Path(file.name).replace(path)

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        statuses: list[ReadStatus] = []
        for path in [self._file(name) for name in names]:
            if call.stop() or (call.leading_only and ReadStatus.ABSENT in statuses):
                statuses.append(ReadStatus.SKIPPED)
                continue
            try:
                record = path.read_bytes()
            except FileNotFoundError:
                statuses.append(ReadStatus.ABSENT)
            except OSError:
                statuses.append(ReadStatus.UNAVAILABLE)
            else:
                receive(len(statuses), memoryview(record))
                statuses.append(ReadStatus.OK)
        return statuses

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return [PutStatus.TIMEOUT if call.stop() else self._put(self._file(item.name), item) for item in items]

    def _put(self, path: Path, item: PutItem) -> PutStatus:
        if self._opened().read_only:
            return PutStatus.READ_ONLY
        if path.exists():
            return PutStatus.EXISTS
        try:
            self._publish(path, item.buffers)
        except OSError:
            return PutStatus.UNAVAILABLE
        return PutStatus.STORED

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        found = [
            Presence.PRESENT if self._file(name).exists() else Presence.ABSENT for name in names if not call.stop()
        ]
        return found + [Presence.UNKNOWN] * (len(names) - len(found))

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        present = [path for path in map(self._file, dict.fromkeys(names)) if not call.stop() and path.exists()]
        for path in present:
            path.unlink(missing_ok=True)
        return len(present)

    def discard(self, name: bytes, header_checksum: int) -> None:
        path = self._file(name)
        record = path.read_bytes() if path.exists() else b""
        # Not atomic: a repair that comes in between is lost, which costs one more miss.
        if len(record) < 192 or int.from_bytes(record[184:192], "little") == header_checksum:
            path.unlink(missing_ok=True)

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        path = self._file(namespace, ".epoch")
        if bump or not path.exists():
            self._publish(path, [os.urandom(8)])
        return path.read_bytes()

    def usage(self) -> Usage:
        sizes = [path.stat().st_size for path in self._file(b"-").parent.rglob("*.rec")]
        return Usage(records=len(sizes), payload_bytes=sum(sizes), file_bytes=sum(sizes))

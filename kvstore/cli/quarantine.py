"""A directory for damaged records: what was stored, and a line about what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from kvstore.errors import ConfigError
from kvstore.private_files import make_private_directory

LOG: Final = "quarantine.jsonl"
_MOST_NAMED_BYTES: Final = 49  # the core's names; longer ones are hashed to fit a file name
_SAME_NAME: Final = 1000  # files of one record, from as many runs


class Quarantine:
    """Keeps damaged records as files of mode 0600 in a directory of mode 0700; follows no links.

    Args:
        path: The directory; made when it is not there.

    Raises:
        ConfigError: It cannot be used, or others could change what is in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_private_directory(path)
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            link = path.is_symlink()
            why = "is a link, which is not followed" if link else f"cannot be used: {e.strerror}"
            msg = f"quarantine {path} {why}; name a directory that is yours"
            raise ConfigError(msg) from e
        found = os.fstat(self._directory)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            self.close()
            msg = f"quarantine {path} can be changed by others; name a directory of your own, or chmod 700 it"
            raise ConfigError(msg)

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._directory)

    def keep(self, name: bytes, record: bytes | memoryview, facts: Mapping[str, Any]) -> str:
        """Write a record and a line about it; returns the file's name.

        Args:
            name: Its stored name.
            record: Its bytes.
            facts: What the line says besides, in JSON types.

        Raises:
            OSError: It cannot be written; nothing is left of the file then.
        """
        file_name, handle = self._new_file(name)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(record)
            line = {"time": int(time.time()), "file": file_name, "bytes": len(record), **facts}
            self._log(json.dumps(line, ensure_ascii=False) + "\n")
        except BaseException:
            os.unlink(file_name, dir_fd=self._directory)
            raise
        return file_name

    def _new_file(self, name: bytes) -> tuple[str, int]:
        stem = name.hex() if len(name) <= _MOST_NAMED_BYTES else sha256(name).hexdigest()
        for number in range(1, _SAME_NAME):
            file_name = f"{stem}.record" if number == 1 else f"{stem}-{number}.record"
            try:
                return file_name, self._open(file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
        raise OSError(errno.EEXIST, f"{self.path} keeps {_SAME_NAME} files of that record already")

    def _log(self, line: str) -> None:
        handle = self._open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with os.fdopen(handle, "ab", buffering=0) as out:
            out.write(line.encode())  # one write, so that lines of several runs do not mix

    def _open(self, file_name: str, flags: int) -> int:
        return os.open(file_name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._directory)

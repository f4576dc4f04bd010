"""Archives for tests: what is in one, and tars that nobody at kvstore made."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def members(path: Path) -> dict[str, bytes]:
    """What an ordinary tar sees in an archive, in its order."""
    found = {}
    with tarfile.open(path) as tar:
        for info in tar:
            content = tar.extractfile(info)
            assert content is not None
            found[info.name] = content.read()
    return found


def write_tar(path: Path, contents: dict[str, bytes], *extra: tuple[tarfile.TarInfo, bytes]) -> Path:
    """A tar that nobody at kvstore made; the extra members stand behind the first one."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, (name, data) in enumerate(contents.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            for other, content in extra if i == 0 else ():
                tar.addfile(other, io.BytesIO(content))
    return path


def link(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def plain(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data

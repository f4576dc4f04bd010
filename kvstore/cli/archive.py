"""The archive that ``kvstore export`` writes: a tar of records, in one pass and with no surprise inside.

A plain ustar archive, which every tar lists and unpacks::

    kvstore-archive.json                      what it is: {"format": "kvstore-archive", "version": 1}
    <namespace>/namespace.json                readable description of a namespace, where one was kept
    <namespace>/<kind>/<digest>               one record, byte for byte: 32, 2 and 64 hex digits
    kvstore-archive-end.json                  the last member: {"records": N}

A namespace's description comes before its records, and a record behind its parent, so that what is
left of a cut-off archive can be used.  A store that nobody used meanwhile gives the same bytes again:
there are no clocks, no owners and no host names in them.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, TypeAlias

from kvstore.errors import ConfigError
from kvstore.record import HEADER_BYTES, Head, unpack_head

FORMAT: Final = "kvstore-archive"
VERSION: Final = 1
FIRST: Final = "kvstore-archive.json"
LAST: Final = "kvstore-archive-end.json"

BLOCK_BYTES: Final = 512  # of a tar: headers take one, contents are padded to it
MAX_NOTE_BYTES: Final = 1 << 20  # a description has about 1 KiB
MAX_RECORD_BYTES: Final = (1 << 32) + (16 << 20)  # the largest raw block, with room for table, token ids and seals
_CHUNK_BYTES: Final = 1 << 20
_END: Final = bytes(2 * BLOCK_BYTES)
_MAX_TIME: Final = (1 << 33) - 1  # eleven octal digits

_RECORD: Final = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/([0-9a-f]{64})")
_DOCUMENT: Final = re.compile(r"([0-9a-f]{32})/namespace\.json")
_FILES: Final = (b"0", b"\0")
_FOLDER: Final = b"5"
_OCTAL: Final = re.compile(rb"[0-7]{1,12}")

_FOREIGN: Final = f"not an archive of kvstore export: {FIRST} is not its first member; unpack a compressed one first"
_NO_HEADER: Final = "what should be the header of a member is none"


@dataclass(frozen=True, slots=True)
class Parcel:
    """One whole record on its way.

    Attributes:
        kind: Kind of its key, the byte in its stored name.
        head: Its header.
        data: The record; whoever made the parcel does not change it.
    """

    kind: int
    head: Head
    data: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Document:
    """The readable description of a namespace, as JSON text that somebody else wrote."""

    namespace: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Something on the way that is not taken, and why."""

    name: str
    reason: str


Piece: TypeAlias = Parcel | Document | Refused


class ArchiveWriter:
    """Writes an archive front to back; nothing is sought, so the file may be a pipe.

    Args:
        out: Where to; raises what the file raises.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.records = 0
        self.nbytes = 0
        self._note(FIRST, {"format": FORMAT, "version": VERSION})

    def document(self, namespace: bytes, text: str) -> None:
        """Add a namespace's description."""
        self._member(f"{namespace.hex()}/namespace.json", text.encode(), 0)

    def record(self, parcel: Parcel) -> None:
        """Add one record."""
        head = parcel.head
        self._member(f"{head.namespace.hex()}/{parcel.kind:02x}/{head.digest.hex()}", parcel.data, head.created)
        self.records += 1

    def finish(self) -> None:
        """Write the end, without which a reader takes the archive for cut off."""
        self._note(LAST, {"records": self.records})
        self._write(_END)

    def _note(self, name: str, values: dict[str, object]) -> None:
        self._member(name, (json.dumps(values) + "\n").encode(), 0)

    def _member(self, name: str, data: bytes | bytearray, modified: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = len(data), min(modified, _MAX_TIME), 0o600
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        self._write(data)
        self._write(bytes(-len(data) % BLOCK_BYTES))

    def _write(self, data: bytes | bytearray) -> None:
        self._out.write(data)
        self.nbytes += len(data)


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    nbytes: int
    file_type: bytes


class _CutOffError(Exception):
    """The archive ends, or stops making sense, before its end."""


class ArchiveReader:
    """Reads an archive that anybody may have made: nothing it says is believed, nothing is unpacked.

    Iterating gives each member in turn and never raises for what is in the archive: a member that
    is not one of ours, or not what its name says, is :class:`Refused`.  Memory is that of one record,
    and grows with the bytes that really come.  :attr:`cut_off` tells afterwards how it ended.

    Args:
        source: A file or pipe, at its beginning.

    Raises:
        ConfigError: It does not begin as an archive of a version that this release reads.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._at = 0
        self.cut_off = ""
        """Why not everything could be read; empty after a whole archive."""
        self._records = 0
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        note: dict[str, object] = {}
        try:
            member = self._next()
            if member is not None and member.name == FIRST:
                note = self._json(member)
        except _CutOffError as e:
            raise ConfigError(_FOREIGN) from e
        if note.get("format") != FORMAT:
            raise ConfigError(_FOREIGN)
        if note.get("version") != VERSION:
            msg = f"an archive of version {note.get('version')!r:.20}; this release reads version {VERSION}"
            raise ConfigError(msg)

    def __iter__(self) -> Iterator[Piece]:
        try:
            while not self._ended and (member := self._next()) is not None:
                piece = self._piece(member)
                if piece is not None:
                    yield piece
        except _CutOffError as e:
            self.cut_off = f"{e} (at byte {self._at:,})"
        else:
            self.cut_off = "" if self._ended else f"it ends without {LAST}"

    def _check_end(self, member: _Member) -> None:
        """Compare what came with what was sent."""
        said = self._json(member).get("records")
        if said != self._records:
            msg = f"it says that it holds {said!r:.20} records, and {self._records:,} came"
            raise _CutOffError(msg)
        self._ended = True

    def _piece(self, member: _Member) -> Piece | None:
        if member.file_type == _FOLDER and not member.nbytes:
            return None  # whoever unpacks and packs again makes such members
        record = _RECORD.fullmatch(member.name)
        document = _DOCUMENT.fullmatch(member.name)
        if member.file_type not in _FILES:
            return self._refuse(member, "is no plain file")
        if member.name == LAST:
            self._check_end(member)
            return None
        if document is not None:
            return self._document(member, bytes.fromhex(document[1]))
        if record is None:
            return self._refuse(member, "has no name of a record")
        self._records += 1
        return self._parcel(member, *(bytes.fromhex(part) for part in record.groups()))

    def _document(self, member: _Member, namespace: bytes) -> Piece:
        if member.nbytes > MAX_NOTE_BYTES:
            return self._refuse(member, f"{member.nbytes:,} bytes are too many for a description")
        try:
            return Document(namespace, self._read(member).decode())
        except UnicodeDecodeError:
            return Refused(member.name, "is not UTF-8")

    def _parcel(self, member: _Member, namespace: bytes, kind: bytes, digest: bytes) -> Piece:
        """Read a record, its header first: the rest is only worth memory when that fits the member."""
        if not HEADER_BYTES <= member.nbytes <= MAX_RECORD_BYTES:
            return self._refuse(member, f"{member.nbytes:,} bytes are no record's length")
        start = self._take(HEADER_BYTES)
        head = unpack_head(memoryview(start))
        wrong = _contradiction(head, member.nbytes, namespace, digest)
        if wrong:
            self._skip(member, HEADER_BYTES)
            return Refused(member.name, wrong)
        return Parcel(kind[0], head, self._read(member, start))

    def _refuse(self, member: _Member, reason: str) -> Refused:
        self._skip(member)
        return Refused(member.name, reason)

    def _json(self, member: _Member) -> dict[str, object]:
        if member.nbytes > MAX_NOTE_BYTES:
            msg = f"{member.name} has {member.nbytes:,} bytes"
            raise _CutOffError(msg)
        try:
            value = json.loads(self._read(member))
        except (ValueError, RecursionError) as e:
            msg = f"{member.name} is no JSON"
            raise _CutOffError(msg) from e
        return value if isinstance(value, dict) else {}

    def _next(self) -> _Member | None:
        """The next header; None at a tar's end mark."""
        block = self._take(BLOCK_BYTES)
        if not any(block):
            return None
        try:
            name, checksum, nbytes = _text(block[:100]), _octal(block[148:156]), _octal(block[124:136])
            prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
        except ValueError as e:
            raise _CutOffError(_NO_HEADER) from e
        if checksum != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise _CutOffError(_NO_HEADER)
        return _Member(f"{prefix}/{name}" if prefix else name, nbytes, bytes(block[156:157]))

    def _read(self, member: _Member, start: bytearray | None = None) -> bytearray:
        data = start if start is not None else bytearray()
        data += self._take(member.nbytes - len(data))
        self._take(-member.nbytes % BLOCK_BYTES)
        return data

    def _skip(self, member: _Member, taken: int = 0) -> None:
        left = member.nbytes - taken + -member.nbytes % BLOCK_BYTES
        while left:
            left -= len(self._take(min(left, _CHUNK_BYTES)))

    def _take(self, nbytes: int) -> bytearray:
        data = bytearray()
        while len(data) < nbytes:
            chunk = self._source.read(min(nbytes - len(data), _CHUNK_BYTES))
            if not chunk:
                raise _CutOffError("it is cut off")
            data += chunk
            self._at += len(chunk)
        return data


def _octal(field: bytearray) -> int:
    """A number in a header.

    Raises:
        ValueError: It is none, or too large for the plain form.
    """
    digits = bytes(field).strip(b" \0")
    if _OCTAL.fullmatch(digits) is None:
        raise ValueError
    return int(digits, 8)


def _text(field: bytearray) -> str:
    return bytes(field).rstrip(b"\0").decode(errors="replace")


def _contradiction(head: Head, nbytes: int, namespace: bytes, digest: bytes) -> str:
    """What of a header does not fit its member; empty when all does."""
    if (head.namespace, head.digest) != (namespace, digest):
        return "holds another block than its name says"
    if head.record_bytes != nbytes:
        return f"has {nbytes:,} bytes, its header says {head.record_bytes:,}"
    return ""

"""Short forms for reading and writing objects in tests."""

from __future__ import annotations

from kvstore.objects.medium import ObjectBody, ObjectMedium
from kvstore.types import Call


def call(seconds: float = 5.0) -> Call:
    return Call.within(seconds)


def read(medium: ObjectMedium, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
    body = medium.read(key, call(), start=start, stop=stop)
    return None if body is None else drain(body)


def drain(body: ObjectBody) -> bytes:
    with body:
        buffer = bytearray(body.nbytes)
        body.read_into(memoryview(buffer))
    return bytes(buffer)


def write(medium: ObjectMedium, key: str, data: bytes, *, once: bool = False, blocks: int = 1) -> bool:
    return medium.write(key, [data], call(), once=once, blocks=blocks)


def keys(medium: ObjectMedium, prefix: str = "") -> list[str]:
    return sorted(info.key for info in medium.entries(prefix, call()))

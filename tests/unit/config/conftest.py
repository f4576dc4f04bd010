from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest

from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin, Registry
from kvstore.types import ByteSize, Seconds, option


class Mode(Enum):
    DIRECT = "direct"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """One option of every type that config knows."""

    path: str = option(required=True, doc="Directory.")
    buffer: ByteSize = option(1 << 20, doc="Buffer.")
    patience: Seconds = option(0.5, doc="How long to wait.")
    depth: int = option(4, doc="Queue depth.")
    ratio: float = option(0.5, doc="A fraction.")
    sync: bool = option(default=False, doc="Sync.")
    layout: Literal["flat", "tree"] = option("flat", doc="Layout.")
    mode: Mode = option(Mode.BUFFERED, doc="Mode.")
    mirrors: tuple[str, ...] = option((), doc="Mirrors.")
    limit: int | None = option(None, doc="Limit.")
    secret_key: str = field(default="", metadata={"doc": "Credential.", "secret": True})

    def __post_init__(self) -> None:
        if self.depth < 1:
            msg = f"depth is {self.depth}: expected at least 1 (key {self.secret_key})"
            raise ValueError(msg)


@pytest.fixture
def registry() -> Registry:
    """The installed plugins, and a backend ``disk`` with defaults of its own."""
    plugin = BackendPlugin(
        name="disk",
        options=DiskOptions,
        factory=MemoryBackend,
        summary="A disk",
        default_codec="none",
        default_admit="hot",
        default_deadline_s=0.25,
        default_capacity_bytes=1 << 30,
    )

    def kvstore_register_backends() -> list[BackendPlugin]:
        return [plugin]

    module = ModuleType("kv_disk")
    vars(module)["kvstore_register_backends"] = hookimpl(kvstore_register_backends)
    registry = Registry.discover()
    registry.register(module, "disk")
    return registry


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a config file, return its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "kvstore.toml"
        path.write_text(text)
        return path

    return write_file

"""Texts that people and tools write: configs, namespace documents, key sources, and the JSON beside stores."""

from __future__ import annotations

import functools
import logging
import tempfile
import tomllib
from pathlib import Path
from types import MappingProxyType

from kvstore_lmdb.statefile import STATE_NAME, StateFile
from kvstore_nvme.epochs import EPOCHS_NAME, load_epochs
from kvstore_nvme.geometry import ANCHOR_NAME, Geometry, read_anchor

from kvstore.config import Config, load_config
from kvstore.config.effective import effective
from kvstore.errors import BackendUnavailableError, ConfigError, PluginError
from kvstore.keyring import KEY_BYTES, Keyring
from kvstore.namespace import Namespace
from kvstore.plugins import Registry
from kvstore.plugins.loader import installed
from kvstore.spec import BlockSpec

SPEC = BlockSpec(layers=2, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")


@functools.cache
def folder() -> Path:
    """A folder of this process."""
    scratch = tempfile.TemporaryDirectory(prefix="kvstore-fuzz-")
    _KEPT.append(scratch)
    return Path(scratch.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def config(data: bytes) -> None:
    """A file: a config or ConfigError or PluginError; what is a config survives being written and read."""
    path = folder() / "kvstore.toml"
    path.write_bytes(data)
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)
    registry = Registry(installed())
    try:
        read = load_config(path, registry)
    except (ConfigError, PluginError):
        return
    finally:
        logging.getLogger("kvstore").setLevel(logging.NOTSET)
    assert load_config(read, registry) == read
    assert load_config(MappingProxyType(read.to_dict()), registry) == read
    assert load_config(tomllib.loads(read.to_toml()), registry) == read
    assert Config.from_mapping(read.to_dict()).to_dict() == read.to_dict()
    assert all(setting.text for setting in effective(read))


def namespace(data: bytes) -> None:
    """A document: a namespace or ValueError; what is one survives being written and read."""
    try:
        read = Namespace.from_json(data)
    except ValueError:
        return
    again = Namespace.from_json(read.to_json(SPEC))
    assert again == read
    assert again.digest(SPEC) == read.digest(SPEC)
    assert not again.diff(read)


def key_source(data: bytes) -> None:
    """The source of a key in a config: 32 bytes or ConfigError."""
    text = data.decode("utf-8", "surrogateescape")
    if "call:" in text:
        return  # runs what it names
    try:
        ring = Keyring.read([text], "option")
    except ConfigError:
        return
    assert len(ring.current.material) == KEY_BYTES


def notes(data: bytes) -> None:
    """Small files beside a store's data: read, or as good as absent; never another error, never nonsense."""
    from kvstore_lmcache.layout import ChunkLayout  # imports torch, which the other targets do without

    directory = folder()
    (directory / STATE_NAME).write_bytes(data)
    file = StateFile(directory)
    try:
        state = file.read()
    finally:
        file.close()
    assert state is None or state.same_boot in {True, False}
    (directory / ANCHOR_NAME).write_bytes(data)
    try:
        geometry = read_anchor(directory)
    except BackendUnavailableError:
        geometry = None  # of a newer kvstore
    if geometry is not None:
        _usable(geometry)
    (directory / EPOCHS_NAME).write_bytes(data)
    assert all((len(name), len(epoch)) == (16, 8) for name, epoch in load_epochs(directory).items())
    try:
        layout = ChunkLayout.from_header(data[:4096])
    except ValueError:
        return
    assert layout.nbytes >= 0


def _usable(geometry: Geometry) -> None:
    assert type(geometry.region_bytes) is int
    number, start = geometry.place(geometry.segment_regions)
    assert (number, start) == (1, 0)
    assert geometry.place(0) == (0, 0)

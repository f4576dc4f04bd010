"""Which weights a model path stands for, from files on this machine and without a network."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.fingerprint import fingerprint_weights

logger = logging.getLogger(__name__)

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT: Final = re.compile(r".*/models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known about a model from its files.

    Attributes:
        name: Repository of a Hugging Face download, or the path as it was given.
        revision: The Hugging Face commit, or the fingerprint of local weights; None when not known.
        fields: The content of ``config.json``; None when there is none.
        is_local: Whether the path is of this machine and no Hugging Face download: its name says nothing.
    """

    name: str
    revision: str | None
    fields: dict[str, Any] | None
    is_local: bool = False


def find_model(path: str, revision: str | None = None) -> ModelFiles:
    """Look a model up: local weights, a Hugging Face snapshot, or a name in the Hugging Face cache.

    Reads at most a megabyte or so per weight file, and only of local ones.  Never raises: what
    cannot be read is not known, and weights that cannot be told are logged.

    Args:
        path: What the engine was given as its model: a folder, a single file (GGUF) or a hub name.
        revision: The branch, tag or commit that it was given; ``main`` when not.
    """
    if os.path.exists(os.path.expanduser(path)):  # noqa: PTH110, PTH111 - a hub name is no path
        folder = Path(path).expanduser()
        snapshot = _SNAPSHOT.fullmatch(folder.absolute().as_posix())
        if snapshot:
            return ModelFiles(snapshot["id"].replace("--", "/"), snapshot["commit"], _fields(folder))
        return ModelFiles(path, _weights(folder), _fields(folder), is_local=True)
    repository = _hub_folder() / f"models--{path.replace('/', '--')}"
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        commit = _text(repository / "refs" / commit).strip()
    if not _COMMIT.fullmatch(commit):
        return ModelFiles(path, None, None)
    return ModelFiles(path, commit, _fields(repository / "snapshots" / commit))


def _hub_folder() -> Path:
    """Where Hugging Face keeps downloads, by its documented environment variables."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _weights(folder: Path) -> str | None:
    try:
        return fingerprint_weights(folder)
    except (OSError, ValueError) as e:
        logger.warning("%s: its weights cannot be fingerprinted (%s); say the revision yourself", folder, e)
        return None


def _fields(folder: Path) -> dict[str, Any] | None:
    try:
        fields = json.loads(_text(folder / "config.json"))
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""

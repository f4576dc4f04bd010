"""The readable descriptions that backends keep beside the data of each namespace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore.cli.store import Store

_MAX_BYTES: Final = 1 << 20  # a description has about 1 KiB; what is larger is something else
_MAX_FILES: Final = 1000


def read_documents(store: Store) -> dict[str, dict[str, Any]]:
    """Return the descriptions beside a store's data, by the namespace's digest in hex.

    They say themselves which namespace they describe, so file names do not matter.  What is
    missing or damaged is left out: the records do not need it.
    """
    directory = getattr(store.tier.options, "path", None)
    if not isinstance(directory, str):
        return {}
    root = Path(directory).expanduser()
    documents: dict[str, dict[str, Any]] = {}
    for path in sorted([*root.glob("*.json"), *root.glob("*/*.json")])[:_MAX_FILES]:
        document = _read(path)
        if document is not None:
            documents[str(document["digest"])] = document
    return documents


def _read(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "digest" in document else None


def identity_lines(document: dict[str, Any] | None) -> Iterator[str]:
    """Describe a namespace in two lines; nothing when no description was kept."""
    identity = _section(document, "identity")
    if identity:
        said = [f"{name} {value}" for name, value in identity.items() if value is not None and name != "key_scheme"]
        yield ", ".join(said)
    spec = _section(document, "spec")
    if spec:
        axes = (
            ("layers", "layers"),
            ("kv", "k/v"),
            ("block_tokens", "tokens"),
            ("kv_heads", "heads"),
            ("head_dim", "elements"),
        )
        yield f"blocks: {spec.get('dtype')} {spec.get('layout')}, " + " x ".join(f"{spec.get(k)} {n}" for k, n in axes)


def _section(document: dict[str, Any] | None, name: str) -> dict[str, Any]:
    section = (document or {}).get(name)
    return section if isinstance(section, dict) else {}

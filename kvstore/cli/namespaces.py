"""The readable descriptions that backends keep beside the data of each namespace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from kvstore.cli.output import printable
from kvstore.errors import BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.private_files import read_small_file
from kvstore.spec import BlockSpec

if TYPE_CHECKING:
    from kvstore.cli.store import Store

_MAX_BYTES: Final = 1 << 20  # a description has about 1 KiB; what is larger is something else
_MAX_FILES: Final = 1000


@runtime_checkable
class Describing(Protocol):
    """A backend that hands out the descriptions it keeps, because they lie in no directory."""

    def description(self, namespace: bytes) -> bytes | None:
        """Return what is kept for a namespace, at most 1 MiB of it; None when nothing is."""
        ...


def read_documents(store: Store, namespaces: Iterable[bytes] = ()) -> dict[str, dict[str, Any]]:
    """Return the descriptions beside a store's data, by the namespace's digest in hex.

    They say themselves which namespace they describe, so file names do not matter.  What is
    missing or damaged is left out: the records do not need it.

    Args:
        store: Opened.
        namespaces: Digests that a store without a directory is asked for.
    """
    documents: dict[str, dict[str, Any]] = {}
    for data in (*_files(store), *_kept(store, namespaces)):
        document = _parse(data)
        if document is not None:
            documents[str(document["digest"])] = document
    return documents


def _files(store: Store) -> Iterator[bytes]:
    directory = getattr(store.tier.options, "path", None)
    if not isinstance(directory, str):
        return
    root = Path(directory).expanduser()
    for path in sorted([*root.glob("*.json"), *root.glob("*/*.json")])[:_MAX_FILES]:
        data = read_small_file(path, _MAX_BYTES)
        if data is not None:
            yield data


def _kept(store: Store, namespaces: Iterable[bytes]) -> Iterator[bytes]:
    if isinstance(store.backend, Describing):
        for namespace in namespaces:
            try:
                data = store.backend.description(namespace)
            except BackendError:
                continue
            if data is not None:
                yield data


def _parse(data: bytes | str) -> dict[str, Any] | None:
    if len(data) > _MAX_BYTES:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "digest" in document else None


def parse_json(path: Path) -> dict[str, Any] | None:
    """Read one file as a description; None when it is none.

    Raises:
        ConfigError: It cannot be read.
        ValueError: It is no JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as e:
        msg = f"{path} cannot be read: {e.strerror}"
        raise ConfigError(msg) from e
    if data.lstrip()[:1] != b"{":
        msg = f"{path} is no JSON object"
        raise ValueError(msg)
    return _parse(data)


def parse_document(data: bytes | str) -> tuple[Namespace, BlockSpec] | None:
    """Rebuild what a description describes; None when its fields do not make the digest it claims.

    A release that knows more fields may have written it, or somebody may have made it up.
    """
    document = _parse(data)
    spec = section(document, "spec")
    try:
        namespace = Namespace.from_json(json.dumps(document))
        block = BlockSpec(**{f.name: spec[f.name] for f in fields(BlockSpec)})
        sound = document is not None and namespace.digest(block).hex() == document["digest"]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return (namespace, block) if sound else None


def identity_lines(document: dict[str, Any] | None) -> Iterator[str]:
    """Describe a namespace in two lines; nothing when no description was kept."""
    identity = section(document, "identity")
    if identity:
        said = [f"{name} {value}" for name, value in identity.items() if value is not None and name != "key_scheme"]
        yield ", ".join(map(printable, said))
    spec = section(document, "spec")
    if spec:
        axes = (
            ("layers", "layers"),
            ("kv", "k/v"),
            ("block_tokens", "tokens"),
            ("kv_heads", "heads"),
            ("head_dim", "elements"),
        )
        yield f"blocks: {spec.get('dtype')} {spec.get('layout')}, " + " x ".join(f"{spec.get(k)} {n}" for k, n in axes)


def section(document: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """One part of a description; empty when it is not there."""
    found = (document or {}).get(name)
    return found if isinstance(found, dict) else {}


def find_namespace(wanted: str, digests: Iterable[bytes], documents: dict[str, dict[str, Any]], where: str) -> bytes:
    """The one namespace that somebody means.

    Args:
        wanted: Start of its digest in hex, or the name of its model.
        digests: Those that there are.
        documents: As :func:`read_documents` returns.
        where: Names the store, for messages.

    Raises:
        ConfigError: None fits, or several do.
    """
    known = sorted(digests)
    found = [d for d in known if d.hex().startswith(wanted.lower())]
    found += [d for d in known if d not in found and model_of(documents.get(d.hex())) == wanted]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(f"{d.hex()} {model_of(documents.get(d.hex())) or ''}".rstrip() for d in found or known)
    if found:
        msg = f"{wanted!r} fits several namespaces of {where}: {listed}; give more digits of the one you mean"
    else:
        msg = f"{where} has no namespace {wanted!r}; expected the start of a digest or a model of: {listed or 'none'}"
    raise ConfigError(msg)


def model_of(document: dict[str, Any] | None) -> str | None:
    """The model that a description names."""
    model = section(document, "identity").get("model")
    return printable(model) if isinstance(model, str) else None

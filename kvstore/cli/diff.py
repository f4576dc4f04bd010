"""``kvstore diff``: why two namespaces share no blocks, and what each of them holds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, Command, Subcommands, add_command
from kvstore.cli.namespaces import find_namespace, model_of, parse_json, read_documents, section
from kvstore.cli.output import print_json, printable, progress, table
from kvstore.errors import ConfigError
from kvstore.namespace import IDENTITY_FIELDS

if TYPE_CHECKING:
    from kvstore.cli.store import Site

_DESCRIPTION = """\
Compares two namespaces: in which fields they differ, those that separate blocks before those that only
describe, and how many blocks both hold. A and B are each the start of a namespace's digest in hex or a
model's name, in the store that --in names (given twice: A in the first store, B in the second); or
without --in, a namespace.json file, or a config or directory of a store that holds one namespace. The
blocks of two namespaces are the same when they stand for the same tokens. Reads the heads of records
and changes nothing. Ends with 0 when both are one namespace with the same blocks, else with 1."""

_SPEC_FIELDS: Final = ("dtype", "layout", "layers", "kv", "block_tokens", "kv_heads", "head_dim", "opaque_tag")
_DIGEST_SHOWN: Final = 16


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two.

    Attributes:
        where: What the user named.
        namespace: Digest in hex.
        document: Its description; None when nobody kept one.
        blocks: Kind and digest of each block; None when no store was named.
    """

    where: str
    namespace: str
    document: dict[str, Any] | None
    blocks: frozenset[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A field that differs, with both values; None is "not said"."""

    name: str
    kind: Literal["identity", "spec", "descriptive"]
    a: Any
    b: Any


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="diff",
            summary="tell in which fields two namespaces differ",
            description=_DESCRIPTION,
            examples=(
                ("kvstore diff 1d06 fd02 --in /var/lib/kvstore", "two namespaces of a store, by their digests"),
                ("kvstore diff my/model my/model --in old.toml --in new.toml", "one model in two stores"),
                ("kvstore diff a/namespaces/1d06.json b/namespaces/fd02.json", "two descriptions, without a store"),
            ),
            run=_run,
        ),
    )
    parser.add_argument("a", metavar="A", help="a namespace: start of its digest, model, file, or store")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument(
        "--in", dest="stores", action="append", metavar="STORE", help="store of A and B; twice: of each"
    )
    parser.add_argument("--tier", metavar="NAME", help="tier of the configs")
    parser.add_argument("--backend", metavar="NAME", help="backend of stores that are directories (lmdb)")


def _run(args: argparse.Namespace) -> int:
    stores = args.stores or []
    if len(stores) > 2:
        msg = f"--in is given {len(stores)} times; once for both namespaces, or twice"
        raise ConfigError(msg)
    places = _Places(args.tier, args.backend)
    a = places.side(args.a, stores[0] if stores else None)
    b = places.side(args.b, stores[-1] if stores else None)
    report = compare(a, b)
    if args.json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    blocks = report["blocks"]
    same = report["same_namespace"] and not (blocks and (blocks["only_a"] or blocks["only_b"]))
    return EXIT_OK if same else EXIT_FINDINGS


@dataclass(slots=True)
class _Contents:
    """What a store holds, by namespace."""

    blocks: dict[bytes, set[bytes]]
    documents: dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Places:
    """The stores that were named; each is read once."""

    tier: str | None
    backend: str | None
    read: dict[str, _Contents] = field(default_factory=dict)

    def side(self, name: str, store: str | None) -> Side:
        """Find what a name means.

        Raises:
            ConfigError: It means nothing, or several things.
        """
        if store is not None:
            contents = self._contents(store)
            return self._side(store, contents, find_namespace(name, contents.blocks, contents.documents, store))
        path = Path(name).expanduser()
        if not path.exists():
            msg = f"{name}: no such file or directory; a namespace is named by its digest or model with --in STORE"
            raise ConfigError(msg)
        document = _description(path)
        if document is not None:
            return Side(name, str(document["digest"]), document)
        contents = self._contents(name)
        if len(contents.blocks) == 1:
            return self._side(name, contents, next(iter(contents.blocks)))
        listed = "; ".join(f"{d.hex()} {model_of(contents.documents.get(d.hex())) or ''}" for d in contents.blocks)
        msg = f"{name} holds {len(contents.blocks)} namespaces; name one, with --in {name}: {listed or 'none'}"
        raise ConfigError(msg)

    @staticmethod
    def _side(where: str, contents: _Contents, namespace: bytes) -> Side:
        document = contents.documents.get(namespace.hex())
        return Side(where, namespace.hex(), document, frozenset(contents.blocks[namespace]))

    def _contents(self, store: str) -> _Contents:
        from kvstore.cli.store import Named, one_site

        if store not in self.read:
            self.read[store] = _contents_of(one_site(Named(store, None, self.tier, self.backend), "--tier"))
        return self.read[store]


def _contents_of(site: Site) -> _Contents:
    from kvstore.cli.records import survey

    with site.opened() as store:
        with progress(f"list {store.tier.name}", store.backend.usage().records) as advance:
            found = survey(store, advance)
        blocks: dict[bytes, set[bytes]] = {}
        for record in found.records:
            blocks.setdefault(record.namespace, set()).add(record.name[16:])
        return _Contents(blocks, read_documents(store, blocks))


def _description(path: Path) -> dict[str, Any] | None:
    """A namespace.json file; None when it is something else, such as a config."""
    if path.is_dir() or path.suffix == ".toml":
        return None
    try:
        document = parse_json(path)
    except ValueError:
        return None
    if document is None:
        msg = f"{path} is no description of a namespace; expected a namespace.json, a config, or a directory"
        raise ConfigError(msg)
    return document


def compare(a: Side, b: Side) -> dict[str, Any]:
    """Tell what differs, in JSON types."""
    blocks = None
    if a.blocks is not None and b.blocks is not None:
        blocks = {
            "both": len(a.blocks & b.blocks),
            "only_a": len(a.blocks - b.blocks),
            "only_b": len(b.blocks - a.blocks),
        }
    differing = list(fields_that_differ(a.document or {}, b.document or {})) if a.document and b.document else []
    return {
        "a": _as_dict(a),
        "b": _as_dict(b),
        "same_namespace": a.namespace == b.namespace,
        "fields": [{"field": f.name, "kind": f.kind, "a": f.a, "b": f.b} for f in differing],
        "blocks": blocks,
    }


def _as_dict(side: Side) -> dict[str, Any]:
    return {"where": side.where, "namespace": side.namespace, "description": side.document}


def fields_that_differ(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Field]:
    """Compare two descriptions: what separates blocks first, then the spec, then what only describes."""
    for kind, known in (("identity", IDENTITY_FIELDS), ("spec", _SPEC_FIELDS), ("descriptive", ())):
        one, other = section(a, kind), section(b, kind)
        names = dict.fromkeys([*known, *one, *other])  # also those that a newer release writes
        names.pop("fingerprint", None)  # of the spec's other fields
        for name in names:
            if one.get(name) != other.get(name):
                shown = f"spec.{name}" if kind == "spec" else name
                yield Field(shown, kind, one.get(name), other.get(name))  # type: ignore[arg-type]


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for name in ("a", "b"):
        side = report[name]
        model = model_of(side["description"])
        yield f"{name.upper()}  {side['namespace'][:_DIGEST_SHOWN]}  {model or 'no description'}  ({side['where']})"
    yield from _field_lines(report)
    blocks = report["blocks"]
    if blocks is not None:
        yield f"blocks: {blocks['both']:,} in both, {blocks['only_a']:,} only in A, {blocks['only_b']:,} only in B"


def _field_lines(report: dict[str, Any]) -> Iterator[str]:
    if report["same_namespace"]:
        yield "one namespace: they share blocks"
    elif not (report["a"]["description"] and report["b"]["description"]):
        yield "different namespaces; in which fields is not known, because no description was kept"
    for kinds, title in ((("identity", "spec"), "differ, so they share no blocks:"), (("descriptive",), "describe:")):
        rows = [(f["field"], _shown(f["a"]), _shown(f["b"])) for f in report["fields"] if f["kind"] in kinds]
        if rows:
            yield title
            yield from (f"  {line}" for line in table([("FIELD", "A", "B"), *rows]))


def _shown(value: Any) -> str:
    return "-" if value is None or value == "" else printable(str(value))

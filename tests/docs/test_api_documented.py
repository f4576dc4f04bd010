"""docs/reference/api.md names every public thing, and its signatures are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import enum
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import kvstore
from kvstore import BlockSpec, KVCache, KVCacheKey, KVStoreError, Namespace
from kvstore.l1.lease import Lease
from kvstore.l1.reservation import Reservation
from tests.docs.markdown import ROOT, page

PAGE = ROOT / "docs/reference/api.md"
EXPANDED: tuple[type[Any], ...] = (KVCache, KVCacheKey, Namespace)
"""Classes whose public methods have a heading each."""


def is_error(name: str) -> bool:
    kind = getattr(kvstore, name)
    return inspect.isclass(kind) and issubclass(kind, KVStoreError)


ERRORS = [name for name in kvstore.__all__ if is_error(name)]
NAMES = [name for name in kvstore.__all__ if name not in ERRORS and name != "__version__"]


def methods() -> dict[str, Callable[..., Any]]:
    """Public methods by the heading they need."""
    found: dict[str, Callable[..., Any]] = {"BlockSpec.opaque": BlockSpec.opaque}
    for kind in EXPANDED:
        for name, member in inspect.getmembers(kind, callable):
            if not name.startswith("_") and name not in ("index", "count"):  # the two of Sequence
                found[f"{kind.__name__}.{name}"] = member
    return found


def documented_signature(heading: str) -> str:
    """The code right below a heading, ``""`` if there is none."""
    text = PAGE.read_text(encoding="utf-8")
    for level in ("## ", "### "):
        _, found, below = text.partition(f"\n{level}{heading}\n\n```python\n")
        if found and not below.startswith(">>>"):
            return below.partition("\n```")[0]
    return ""


def shape(arguments: ast.arguments, result: ast.expr | None) -> dict[str, Any]:
    """What of a signature must agree: names, kinds, types, defaults, and the result."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        "positional": [(a.arg, _text(a.annotation), _text(d)) for a, d in zip(positional, defaults, strict=True)],
        "keyword": [(a.arg, _text(a.annotation), _text(d)) for a, d in by_keyword],
        "result": _text(result),
    }


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def parsed(signature: str) -> ast.FunctionDef:
    function = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def as_source(name: str, target: Callable[..., Any]) -> ast.FunctionDef:
    """The code's own signature, without ``self``; defaults that are no literals become ``...``."""
    signature = inspect.signature(target)
    parameters = [
        p if isinstance(p.default, (int, float, str, tuple, type(None), type(p.empty))) else p.replace(default=...)
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    source = str(signature.replace(parameters=parameters)).replace("Ellipsis", "...").replace("<factory>", "...")
    return parsed(f"{name}{source}")


def unquoted(node: ast.expr | None) -> ast.expr | None:
    """With ``from __future__ import annotations`` types are strings; make them code again."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ast.parse(node.value, mode="eval").body
    return node


def agree(documented: str, target: Callable[..., Any]) -> bool:
    shown, real = parsed(documented), as_source("f", target)
    for argument in [*real.args.args, *real.args.kwonlyargs]:
        argument.annotation = unquoted(argument.annotation)
    result = None if inspect.isclass(target) else unquoted(real.returns)
    return shape(shown.args, shown.returns) == shape(real.args, result)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_heading(name: str) -> None:
    assert name in page("docs/reference/api.md").headings


@pytest.mark.parametrize("name", ERRORS)
def test_every_public_error_is_listed_with_a_link(name: str) -> None:
    assert f"| [`{name}`](errors.md#{name.lower()}) | " in page("docs/reference/api.md").prose


@pytest.mark.parametrize("name", methods())
def test_every_method_has_its_real_signature_below_its_heading(name: str) -> None:
    assert agree(documented_signature(name), methods()[name])


@pytest.mark.parametrize("name", [n for n in NAMES if dataclasses.is_dataclass(getattr(kvstore, n))])
def test_every_public_dataclass_has_its_real_signature_below_its_heading(name: str) -> None:
    assert agree(documented_signature(name), getattr(kvstore, name))


@pytest.mark.parametrize("kind", [kind for n in NAMES if isinstance(kind := getattr(kvstore, n), enum.EnumMeta)])
def test_every_member_of_an_answer_is_explained(kind: enum.EnumMeta) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
    assert [name for name in kind.__members__ if f"`{name}`" not in section] == []


@pytest.mark.parametrize("kind", [Lease, Reservation], ids=lambda kind: kind.__name__)
def test_every_member_of_what_calls_return_is_explained(kind: type[Any]) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
    names = [name for name in vars(kind) if not name.startswith("_")]
    assert names
    assert [name for name in names if f"`{name}`" not in section and f"`{name}(" not in section] == []


def test_every_property_of_the_cache_is_explained() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n### Properties\n")[2].partition("\n## ")[0]
    names = [name for name, _ in inspect.getmembers(KVCache, lambda member: isinstance(member, property))]
    assert names
    assert [name for name in names if f"| `{name}` |" not in section] == []


def test_the_examples_show_what_happens() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "get(key: KVCacheKey) -> int",
        "get(key: KVCacheKey, into: Blocks) -> int",
        "get(key: KVCacheKey, *, out: Blocks) -> int",
        "get(key: KVCacheKey, out: Blocks = None) -> int",
        "get(key: KVCacheKey, out: Tensor) -> int",
        "get(key: KVCacheKey, out: Blocks) -> Lookup",
    ],
)
def test_another_signature_is_noticed(wrong: str) -> None:
    assert agree("get(key: KVCacheKey, out: Blocks) -> int", KVCache.get)
    assert not agree(wrong or "get()", KVCache.get)

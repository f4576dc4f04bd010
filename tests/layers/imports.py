"""Read which module imports which, from source text alone; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]

Scope = Literal["module", "function", "typing"]


@dataclass(frozen=True)
class Import:
    """One import statement: what it names and when it runs."""

    target: str
    line: int
    scope: Scope


def package_roots() -> list[Path]:
    """Every import package that the distribution ships."""
    return [ROOT / "kvstore", *sorted(ROOT.glob("backends/*/kvstore_*")), *sorted(ROOT.glob("plugins/*/kvstore_*"))]


def shipped_files() -> dict[str, Path]:
    """Module name to file, for all shipped code."""
    files: dict[str, Path] = {}
    for root in package_roots():
        for path in sorted(root.rglob("*.py")):
            parts = [*path.relative_to(root.parent).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            files[".".join(parts)] = path
    return files


def shipped_sources() -> dict[str, str]:
    """Module name to source text, for all shipped code."""
    return {name: path.read_text(encoding="utf-8") for name, path in shipped_files().items()}


def imports_of(module: str, source: str, known: Iterable[str]) -> list[Import]:
    """List the imports of one module.

    ``from package import name`` counts as an import of ``package.name`` when that is a known
    module; ``importlib.import_module("literal")`` counts as well, so that it is no way around.
    """
    names = set(known)
    is_package = any(other.startswith(f"{module}.") for other in names)
    return list(_walk(ast.parse(source), "module", module, names, is_package=is_package))


def _walk(node: ast.AST, scope: Scope, module: str, known: set[str], *, is_package: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inner: Scope = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and scope == "module":
            inner = "function"
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), "typing", module, known, is_package=is_package)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), scope, module, known, is_package=is_package)
            continue
        for target in _targets(child, module, known, is_package=is_package):
            yield Import(target, getattr(child, "lineno", 0), inner)
        yield from _walk(child, inner, module, known, is_package=is_package)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _targets(node: ast.AST, module: str, known: set[str], *, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".") if is_package else module.split(".")[:-1]
            parts = parts[: len(parts) - (node.level - 1)]
            base = ".".join([*parts, base]) if base else ".".join(parts)
        return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
    if isinstance(node, ast.Call) and _is_import_call(node) and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []


def _is_import_call(node: ast.Call) -> bool:
    called = node.func
    return (isinstance(called, ast.Attribute) and called.attr == "import_module") or (
        isinstance(called, ast.Name) and called.id in ("__import__", "import_module")
    )


def report(found: Iterable[str], advice: str = "") -> str:
    """All findings, one a line; pytest would cut a list short."""
    return "\n".join([advice, *found])


def graph(sources: Mapping[str, str]) -> dict[str, list[Import]]:
    """Imports of every module in ``sources``."""
    return {module: imports_of(module, source, sources) for module, source in sources.items()}


def find_cycle(edges: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Return one cycle as a closed path, or None."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for successor in sorted(edges.get(node, ())):
            if found := visit(successor):
                return found
        path.pop()
        done.add(node)
        return None

    for start in sorted(edges):
        if found := visit(start):
            return found
    return None

"""What shipped source text may not contain: long files, asserts, unsafe loading, empty names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.layers.imports import ROOT, report, shipped_sources

MAX_FILE_LINES = 400
CODE_FOLDERS = ("kvstore", "backends", "plugins", "tests", "benchmarks", "examples")

UNSAFE_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"})
UNSAFE_CALLS = frozenset(
    {"eval", "exec", "compile", "__import__", "torch.load", "torch.save", "torch.jit.load", "torch.hub.load"}
)
EMPTY_NAME = re.compile(r"(^Base(?![a-z]))|Manager|Helper|Util(s|ities|ity)?$|Utils|Impl$")


def long_files(files: Mapping[str, str]) -> list[str]:
    counts = {name: len(text.splitlines()) for name, text in files.items()}
    return [f"{name} has {count} lines" for name, count in counts.items() if count >= MAX_FILE_LINES]


def asserts(sources: Mapping[str, str]) -> list[str]:
    return [f"{m}:{n.lineno}" for m, n in nodes(sources) if isinstance(n, ast.Assert)]


def unsafe_loads(sources: Mapping[str, str]) -> list[str]:
    found = []
    for module, node in nodes(sources):
        if isinstance(node, ast.Import):
            found += [
                f"{module}:{node.lineno} {a.name}" for a in node.names if a.name.partition(".")[0] in UNSAFE_MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            found.append(f"{module}:{node.lineno} {node.module}")
        elif isinstance(node, ast.Call) and (ast.unparse(node.func) in UNSAFE_CALLS or _allows_pickle(node)):
            found.append(f"{module}:{node.lineno} {ast.unparse(node.func)}")
    return found


def _allows_pickle(call: ast.Call) -> bool:
    """Whether numpy may unpickle what it reads or writes."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "allow_pickle"]
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in given)


def empty_names(sources: Mapping[str, str]) -> list[str]:
    classes = [f"{m}.{n.name}" for m, n in nodes(sources) if isinstance(n, ast.ClassDef) and EMPTY_NAME.search(n.name)]
    words = {"manager", "helper", "helpers", "util", "utils", "impl", "misc", "common"}
    files = {module: module.rpartition(".")[2].split("_") for module in sources}
    return classes + [module for module, parts in files.items() if words & {*parts} or parts[0] == "base"]


def nodes(sources: Mapping[str, str]) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.stmt | ast.expr):
                yield module, node


def code_files() -> dict[str, str]:
    paths = (path for folder in CODE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return shipped_sources()


def test_files_are_shorter_than_400_lines() -> None:
    files = code_files()
    assert str(Path(__file__).relative_to(ROOT)) in files
    found = long_files(files)
    assert not found, report(found)


def test_shipped_code_has_no_assert(sources: dict[str, str]) -> None:
    suites = "kvstore.testing."  # whose business is asserting
    found = asserts({path: text for path, text in sources.items() if not path.startswith(suites)})
    assert not found, report(found, "python -O drops them; raise an error of kvstore.errors")


def test_shipped_code_loads_nothing_that_runs_code(sources: dict[str, str]) -> None:
    found = unsafe_loads(sources)
    assert not found, report(found)


def test_names_say_what_a_thing_is(sources: dict[str, str]) -> None:
    found = empty_names(sources)
    assert not found, report(found)


def test_python_files_start_with_future_annotations(sources: dict[str, str]) -> None:
    missing = [
        m
        for m, text in sources.items()
        if ast.parse(text).body[1:] and "from __future__ import annotations" not in text
    ]
    assert missing == []


def test_the_rules_catch_what_they_forbid() -> None:
    assert long_files({"a.py": "x\n" * 399, "b.py": "x\n" * 400}) == ["b.py has 400 lines"]
    assert asserts({"kvstore.cache": "def f(x):\n    assert x"}) == ["kvstore.cache:2"]
    bad = "import pickle\nfrom marshal import loads\neval('1')\ndef f(torch, p):\n    torch.load(p)\n    model.eval()"
    assert unsafe_loads({"m": bad}) == ["m:1 pickle", "m:2 marshal", "m:3 eval", "m:5 torch.load"]
    names = "class TierManager: ...\nclass BaseTier: ...\nclass Baseline: ...\nclass TierImpl: ...\nclass Tier: ..."
    assert empty_names({"kvstore.planes_base": "", "kvstore.base_tier": ""}) == ["kvstore.base_tier"]
    assert empty_names({"kvstore.tier_utils": names}) == [
        "kvstore.tier_utils.TierManager",
        "kvstore.tier_utils.BaseTier",
        "kvstore.tier_utils.TierImpl",
        "kvstore.tier_utils",
    ]

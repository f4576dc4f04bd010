"""The same rule as in test_floors, asked of a real interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.layers.floors import HEAVY

DISCOVERY = "from kvstore.plugins import Registry; r = Registry.discover(); r.list()"


def heavy_modules_after(statement: str) -> list[str]:
    script = (
        f"import json, sys\n{statement}\nprint(json.dumps([name for name in {sorted(HEAVY)} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "statement",
    [
        "import kvstore",
        "from kvstore import BlockSpec, Namespace, KVCacheKey, KVStoreError, Config, hookimpl",
        DISCOVERY,
        "import kvstore.cli.main; kvstore.cli.main.build_parser()",
    ],
)
def test_light_statement_imports_nothing_heavy(statement: str) -> None:
    assert heavy_modules_after(statement) == []


def test_the_probe_sees_a_heavy_import() -> None:
    assert heavy_modules_after("import numpy") == ["numpy"]

"""How the suites treat those who subclass them, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvstore.testing
from kvstore.testing import BackendConformance, CodecConformance, PolicyConformance, deviates
from kvstore.testing.deviations import Suite, deviation

SUITES = (BackendConformance, CodecConformance, PolicyConformance)


def laws(suite: type[Suite]) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]


@pytest.mark.parametrize("suite", SUITES)
def test_a_law_cannot_be_redefined_silently(suite: type[Suite]) -> None:
    law = laws(suite)[0]
    with pytest.raises(TypeError, match=f"Mine redefines the law {law}; if it must, say why"):
        type("Mine", (suite,), {law: lambda self: None})
    with pytest.raises(TypeError, match="redefines the law"):
        type("Mine", (suite,), {law: None})
    between = type("Between", (suite,), {})
    with pytest.raises(TypeError, match="redefines the law"):
        type("Mine", (between,), {law: lambda self: None})


def test_a_law_is_redefined_with_a_reason_and_tests_are_added_without() -> None:
    law = laws(PolicyConformance)[0]
    members = {law: deviates("it is a law of another land")(lambda self: None), "test_of_my_own": lambda self: None}
    mine = type("Mine", (PolicyConformance,), members)
    assert deviation(getattr(mine, law)) == "it is a law of another land"
    assert deviation(mine.test_of_my_own) == ""  # type: ignore[attr-defined]  # made above


@pytest.mark.parametrize("reason", ["", "  ", lambda: None])
def test_a_deviation_needs_a_reason(reason: str) -> None:
    with pytest.raises(TypeError, match="needs a reason"):
        deviates(reason)


def test_parts_of_the_suite_do_not_hide_each_others_laws() -> None:
    parts = [part for part in BackendConformance.__mro__ if part is not object]
    named = [name for part in parts for name in vars(part) if name.startswith("test_")]
    assert len(named) == len(set(named)) == len(laws(BackendConformance))
    assert len(named) > 100


def test_every_public_name_can_be_imported() -> None:
    assert sorted(kvstore.testing.__all__) == kvstore.testing.__all__
    assert [name for name in kvstore.testing.__all__ if not hasattr(kvstore.testing, name)] == []
    assert set(kvstore.testing.__all__) <= set(dir(kvstore.testing))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        kvstore.testing.Nothing  # noqa: B018 - raising is the point


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_other_process_needs_no_test_tools() -> None:
    code = "import sys, kvstore.testing.child; print(sorted({'pytest', 'hypothesis', 'torch'} & set(sys.modules)))"
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_without_the_test_tools_the_message_says_how_to_get_them(missing: str) -> None:
    code = """
import sys
sys.modules[sys.argv[1]] = None
import kvstore.testing
from kvstore.testing import FaultyBackend, deviates
try:
    from kvstore.testing import BackendConformance
except ImportError as e:
    print(e)
"""
    message = run(code, missing)
    assert missing in message
    assert "pip install 'llm-kvstore[testing]'" in message


PLUGIN = """
pytest_plugins = ["kvstore.testing.pytest_plugin"]
"""
TESTS = """
import torch
from kvstore import KVCacheKey
from kvstore.testing import PolicyConformance, deviates


class TestLru(PolicyConformance):
    plugin = "lru"

    @deviates("tried by a test")
    def test_clear_forgets_everything(self, policy): ...


def test_fixtures(kvstore_registry, kvstore_store, kvstore_backend, kvstore_cache, kvstore_spec, tmp_path):
    assert kvstore_registry.backend("memory").name == "memory"
    backend = kvstore_backend("lmdb", path=str(tmp_path / "one"))
    assert backend.usage().records == 0
    assert kvstore_store("memory").make().capabilities
    cache = kvstore_cache("lmdb", path=str(tmp_path / "two"), codec="none")
    key = KVCacheKey.from_tokens(range(16), block_tokens=16)
    assert cache.put(key, torch.zeros(1, *kvstore_spec.shape, dtype=torch.bfloat16)) == 1
"""


def test_the_pytest_plugin_gives_fixtures_and_lists_deviations(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--strict-markers"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "laws that a kvstore plugin deviates from" in done.stdout
    assert "TestLru::test_clear_forgets_everything: tried by a test" in done.stdout

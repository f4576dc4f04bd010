"""``import aibrix_kvcache`` finds these classes after install, and only then."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType

import pytest

from kvstore.compat import aibrix
from kvstore.errors import PluginConflictError

NAME = "aibrix_kvcache"

# What SGLang's backend and AIBrix's own connectors for vLLM import, kernels and tracing left out.
IMPORTED = {
    "": (
        "BaseKVCacheManager BlockHashes GroupAwareKVCacheManager KVCacheBlockLayout KVCacheBlockSpec KVCacheConfig "
        "KVCacheHandle KVCacheKey KVCacheManager KVCacheMetrics KVCacheTensorSpec MemoryRegionKVCacheHandle ModelSpec "
        "Status StatusCodes TokenListView GDRKVCacheHandle ExternalMemoryRegion MemoryRegion __version__"
    ),
    "common.absl_logging": "getLogger log_every_n_seconds log_if",
    "metrics": "KVCacheMetrics KVCacheMetricsExporter Metrics MS_BUCKETS TOKEN_BUCKETS",
    "cache_manager": "BaseKVCacheManager GroupAwareKVCacheManager KVCacheFeature KVCacheManager",
    "cache_handle": "GDRKVCacheHandle KVCacheHandle MemoryRegionKVCacheHandle",
    "cache_hashable": "BlockHashes KVCacheKey KVCacheKeyTypes TokenListView",
    "config": "KVCacheConfig",
    "memory": "ExternalMemoryRegion ManagedMemoryRegion MemoryRegion RefCountedObj",
    "spec": "KVCacheBlockLayout KVCacheBlockSpec KVCacheTensorSpec ModelSpec",
    "status": "Status StatusCodes",
    "version": "__version__",
}


def modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == NAME]


def test_installed_names_are_these_classes() -> None:
    assert not modules()
    aibrix.install()
    for module, names in IMPORTED.items():
        found = importlib.import_module(f"{NAME}.{module}" if module else NAME)
        for name in names.split():
            assert hasattr(found, name), (module, name)
    package = importlib.import_module(NAME)
    assert package.BaseKVCacheManager is aibrix.BaseKVCacheManager
    assert package.spec.KVCacheBlockSpec is package.KVCacheBlockSpec
    assert importlib.util.find_spec(NAME) is not None


def test_a_module_that_is_not_offered_is_not_found() -> None:
    aibrix.install()
    with pytest.raises(ModuleNotFoundError, match="aibrix_kvcache"):
        importlib.import_module(f"{NAME}.l2")


def test_install_twice_is_install_and_uninstall_leaves_nothing() -> None:
    aibrix.install()
    first = sys.modules[NAME]
    aibrix.install({"l1": {"capacity": "1MiB"}})
    assert sys.modules[NAME] is first
    aibrix.uninstall()
    assert not modules()
    aibrix.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)


@pytest.mark.parametrize("name", [NAME, f"{NAME}.status"])
def test_another_package_of_that_name_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    theirs = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, theirs)
    with pytest.raises(PluginConflictError, match="imported already"):
        aibrix.install()
    aibrix.uninstall()
    assert sys.modules[name] is theirs


def test_a_line_of_code_logs_once_in_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    aibrix.install()
    logs = importlib.import_module(f"{NAME}.common.absl_logging")
    logger = logs.getLogger("test.compat")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            logs.log_every_n_seconds(logger, logging.INFO, "every %d", 3600, 7)
        logs.log_every_n_seconds(logger, logging.INFO, "elsewhere", 3600)
        logs.log_every_n_seconds(logger, logging.INFO, None, 3600)
        logs.log_if(logger, logging.INFO, "if", False)  # noqa: FBT003 - their signature
    assert [record.getMessage() for record in caplog.records] == ["every 7", "elsewhere"]

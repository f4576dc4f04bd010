from __future__ import annotations

import subprocess
import sys

import pytest
from kvstore_zstd import hooks

HEAVY = ("zstandard", "numpy", "torch", "xxhash")


def test_descriptors_name_what_their_factories_make() -> None:
    plugins = {plugin.name: plugin for plugin in hooks.kvstore_register_codecs()}
    assert {name: plugin.codec_id for name, plugin in plugins.items()} == {"zstd": 1, "planes": 2, "planes-base": 3}
    for name, plugin in plugins.items():
        codec = plugin.factory()
        assert (codec.name, codec.codec_id) == (name, plugin.codec_id)
        assert plugin.factory() is not codec  # contexts are never shared between threads


@pytest.mark.parametrize("module", ["kvstore_zstd.hooks"])
def test_registration_imports_no_driver(module: str) -> None:
    code = f"import sys, {module} as m; list(m.kvstore_register_codecs()); print([x for x in {HEAVY!r} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_record_module_needs_no_numpy() -> None:
    code = "import sys, kvstore.record; print('numpy' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False False"

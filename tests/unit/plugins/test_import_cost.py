from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, time
started = time.perf_counter()
import kvstore
from kvstore.plugins import Registry
Registry.discover().list()
elapsed = time.perf_counter() - started
print(elapsed)
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_import_and_discovery_are_cheap_and_pull_in_no_driver() -> None:
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    elapsed, modules = out.splitlines()
    assert not {"torch", "numpy", "lmdb", "boto3", "botocore", "zstandard", "xxhash"} & set(modules.split())
    assert float(elapsed) < 1.0  # 150 ms is the budget, measured by benchmarks/bench_import.py on a quiet machine


def test_importing_the_own_hooks_modules_pulls_in_no_driver() -> None:
    code = (
        "import sys\n"
        "from kvstore.plugins import Registry\n"
        "registry = Registry.discover()\n"
        "print(*registry.names('backend'), *registry.names('codec'))\n"
        "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names, modules = out.splitlines()
    assert {"memory", "none"} <= set(names.split())
    assert not {"torch", "lmdb", "boto3", "botocore", "zstandard"} & set(modules.split())

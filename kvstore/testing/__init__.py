"""Conformance suites and doubles for authors of plugins: prove a backend, codec or policy right.

::

    class TestMine(BackendConformance):
        plugin = "mine"

        @pytest.fixture
        def options(self, tmp_path):
            return {"path": str(tmp_path / "store")}

Names are resolved on first use (PEP 562), so that the process which a suite starts to look at a store
from outside needs neither pytest nor hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore.testing.backend_suite import BackendConformance
    from kvstore.testing.codec_suite import CodecConformance
    from kvstore.testing.deviations import deviates
    from kvstore.testing.doubles import (
        FaultyBackend,
        HangingBackend,
        LyingBackend,
        RecordingBackend,
        SlowBackend,
        TornBackend,
        WrappingBackend,
    )
    from kvstore.testing.machine import BackendMachine
    from kvstore.testing.policy_suite import PolicyConformance
    from kvstore.testing.raw import Raw, RawThroughBackend
    from kvstore.testing.registering import register_backend
    from kvstore.testing.store import Store

__all__ = [
    "BackendConformance",
    "BackendMachine",
    "CodecConformance",
    "FaultyBackend",
    "HangingBackend",
    "LyingBackend",
    "PolicyConformance",
    "Raw",
    "RawThroughBackend",
    "RecordingBackend",
    "SlowBackend",
    "Store",
    "TornBackend",
    "WrappingBackend",
    "deviates",
    "register_backend",
]

_HOMES: Final = {
    "BackendConformance": "backend_suite",
    "BackendMachine": "machine",
    "CodecConformance": "codec_suite",
    "FaultyBackend": "doubles",
    "HangingBackend": "doubles",
    "LyingBackend": "doubles",
    "PolicyConformance": "policy_suite",
    "Raw": "raw",
    "RawThroughBackend": "raw",
    "RecordingBackend": "doubles",
    "SlowBackend": "doubles",
    "Store": "store",
    "TornBackend": "doubles",
    "WrappingBackend": "doubles",
    "deviates": "deviations",
    "register_backend": "registering",
}
_REWRITTEN: Final = ("laws", "codec_suite", "policy_suite", "machine", "samples")  # modules with asserts


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    if home in {"backend_suite", "codec_suite", "policy_suite", "machine"}:
        _need_test_tools()
    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _need_test_tools() -> None:
    """Check for the test tools and let pytest explain failed asserts of the suites."""
    try:
        import hypothesis  # noqa: F401 - only whether it is there
        import pytest
    except ImportError as e:
        msg = f"kvstore.testing needs pytest and hypothesis: {e} (pip install 'llm-kvstore[testing]')"
        raise ImportError(msg, name=e.name) from e
    import sys

    names = [f"{__name__}.{module}" for module in _REWRITTEN]
    pytest.register_assert_rewrite(*(name for name in names if name not in sys.modules))

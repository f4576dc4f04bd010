from __future__ import annotations

from kvstore.testing import BackendConformance


class TestMemory(BackendConformance):
    plugin = "memory"

from __future__ import annotations

from kvstore.plugins import Registry
from kvstore.testing import CodecConformance
from tests.support_sealing import NAME, sealing_registry


class TestXor(CodecConformance):
    plugin = NAME
    options = {"phrase": "open sesame"}  # noqa: RUF012 - as a plugin's author writes it

    def registry(self) -> Registry:
        return sealing_registry()


class TestXorOverPlanes(TestXor):
    options = {"phrase": "open sesame", "inner": "planes"}  # noqa: RUF012

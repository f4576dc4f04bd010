from __future__ import annotations

from kvstore.testing import CodecConformance


class TestNone(CodecConformance):
    plugin = "none"


class TestZstd(CodecConformance):
    plugin = "zstd"


class TestPlanes(CodecConformance):
    plugin = "planes"


class TestPlanesBase(CodecConformance):
    plugin = "planes-base"

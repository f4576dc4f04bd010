from __future__ import annotations

from kvstore.testing import PolicyConformance


class TestPrefixLru(PolicyConformance):
    plugin = "prefix-lru"


class TestLru(PolicyConformance):
    plugin = "lru"


class TestFifo(PolicyConformance):
    plugin = "fifo"


class TestS3Fifo(PolicyConformance):
    plugin = "s3fifo"

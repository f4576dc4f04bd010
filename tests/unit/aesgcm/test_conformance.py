"""The codec keeps the laws of every codec, and of those that seal."""

from __future__ import annotations

import pytest

from kvstore.testing import CodecConformance
from tests.unit.aesgcm.sealing import KEY_1, KEY_2, keys


class TestAroundPlanes(CodecConformance):
    plugin = "aes-gcm"
    options = {"keys": keys((1, KEY_1))}  # noqa: RUF012 - read only
    examples = 15


@pytest.mark.slow
class TestAlone(CodecConformance):
    plugin = "aes-gcm"
    options = {"keys": keys((2, KEY_2), (1, KEY_1)), "inner": "none"}  # noqa: RUF012 - read only
    examples = 15

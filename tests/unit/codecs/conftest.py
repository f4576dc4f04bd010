from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from kvstore_zstd.planes import PlanesCodec
from kvstore_zstd.planes_base import PlanesBaseCodec
from kvstore_zstd.zstd_codec import ZstdCodec

from kvstore.blocks import BlockDecoder, BlockEncoder, EncodedRecord
from kvstore.codec import Codec
from kvstore.none_codec import NoneCodec
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec

CODECS: Final[dict[str, Callable[[], Codec]]] = {
    "none": NoneCodec,
    "zstd": ZstdCodec,
    "planes": PlanesCodec,
    "planes-base": PlanesBaseCodec,
}
DATA: Final = Path(__file__).parents[2] / "data"
NAMESPACE: Final = bytes(16)
DIGEST: Final = bytes(32)


def codec_of_id(codec_id: int) -> Codec | None:
    return list(CODECS.values())[codec_id]()


class Trip:
    """Encodes and decodes blocks with one codec (zstd where it does not fit)."""

    data = DATA
    codecs = CODECS

    def __init__(self, spec: BlockSpec, codec: str) -> None:
        self.spec = spec
        self.encoder = BlockEncoder(spec, NAMESPACE, CODECS[codec](), fallback=ZstdCodec())
        self.decoder = BlockDecoder(spec, NAMESPACE, codec_of_id)

    def encode(self, raw: bytes) -> EncodedRecord:
        return self.encoder.encode(memoryview(raw), RecordMeta(DIGEST))

    def decode(self, record: bytes) -> bytes:
        out = bytearray(self.spec.nbytes)
        self.decoder.open(memoryview(record), DIGEST).write_into(memoryview(out))
        return bytes(out)

    def codec_used(self, raw: bytes) -> int:
        """The codec a block ends up with, after proof that it comes back bit for bit."""
        encoded = self.encode(raw)
        record = b"".join(encoded.buffers)
        assert len(record) == encoded.nbytes
        assert self.decode(record) == raw
        self.encoder.recycle()
        return encoded.codec_id


@pytest.fixture
def trip() -> type[Trip]:
    return Trip


@pytest.fixture(params=list(CODECS))
def codec_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["planes", "planes-base"])
def planes_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def real_blocks() -> Callable[[str], list[tuple[BlockSpec, npt.NDArray[Any]]]]:
    def load(pattern: str, dtype: str = "bfloat16") -> list[tuple[BlockSpec, npt.NDArray[Any]]]:
        found = []
        for path in sorted(DATA.glob(pattern)):
            block = np.load(path)
            layers, _, tokens, heads, head_dim = block.shape
            found.append((BlockSpec(layers, heads, head_dim, tokens, dtype), block))
        assert found
        return found

    return load


@pytest.fixture
def rng() -> random.Random:
    return random.Random(11)

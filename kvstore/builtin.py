"""kvstore's own plugins, registered through the same door as everybody else's."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.backend import Backend
from kvstore.codec import Codec
from kvstore.eviction import EvictionPolicy
from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin, CodecPlugin, PolicyPlugin


@hookimpl
def kvstore_register_backends() -> Iterable[BackendPlugin]:
    """The backend in process memory."""
    from kvstore.memory_backend import MemoryBackend, MemoryOptions

    def memory() -> Backend:
        return MemoryBackend()

    return [
        BackendPlugin(
            name="memory",
            options=MemoryOptions,
            factory=memory,
            summary="Process memory; nothing survives a restart",
            default_codec="none",
        )
    ]


@hookimpl
def kvstore_register_codecs() -> Iterable[CodecPlugin]:
    """The codec that stores bytes as they are."""

    def none() -> Codec:
        from kvstore.none_codec import NoneCodec

        return NoneCodec()

    return [CodecPlugin(name="none", codec_id=0, factory=none, summary="Bytes as they are; fastest")]


@hookimpl
def kvstore_register_policies() -> Iterable[PolicyPlugin]:
    """Eviction policies of the L1 cache."""

    def prefix_lru(capacity_blocks: int) -> EvictionPolicy:
        from kvstore.l1.policies.prefix_lru import PrefixLruPolicy

        del capacity_blocks
        return PrefixLruPolicy()

    def lru(capacity_blocks: int) -> EvictionPolicy:
        from kvstore.l1.policies.lru import LruPolicy

        del capacity_blocks
        return LruPolicy()

    def fifo(capacity_blocks: int) -> EvictionPolicy:
        from kvstore.l1.policies.fifo import FifoPolicy

        del capacity_blocks
        return FifoPolicy()

    def s3fifo(capacity_blocks: int) -> EvictionPolicy:
        from kvstore.l1.policies.s3fifo import S3FifoPolicy

        return S3FifoPolicy(capacity_blocks)

    return [
        PolicyPlugin(
            name="prefix-lru",
            factory=prefix_lru,
            summary="Least recently used request first, its tail before its head",
        ),
        PolicyPlugin(name="lru", factory=lru, summary="Least recently used block first"),
        PolicyPlugin(name="fifo", factory=fifo, summary="Oldest block first, whatever its use"),
        PolicyPlugin(name="s3fifo", factory=s3fifo, summary="S3-FIFO: blocks used once leave early"),
    ]

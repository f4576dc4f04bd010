"""Which store stands behind AIBrix's names: what the process says, and what follows for one cache."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.compat.aibrix.environment import DEFAULT_NAMESPACE, Environment, read_environment
from kvstore.config import ENVIRONMENT_VARIABLE

if TYPE_CHECKING:
    from kvstore.compat.aibrix.spec import KVCacheBlockSpec
    from kvstore.config import ConfigSource

HashMeaning = Literal["chained", "content"]

_log: Final = logging.getLogger(__name__)

_SMALLEST_CHUNK_BLOCKS: Final = 4  # as AIBrix: below it the agreement of ranks costs more than it saves


@dataclass(frozen=True, slots=True)
class Choices:
    """What :func:`configure` was told.

    Attributes:
        config: Where L1 and L2 come from; None is the environment.
        namespace: Model and revision; None is unknown.
        block_hashes: What a block hash commits to.
    """

    config: ConfigSource | None = None
    namespace: Namespace | None = None
    block_hashes: HashMeaning = "chained"


@dataclass(frozen=True, slots=True)
class Opened:
    """A store and the settings that hold for it.

    Attributes:
        cache: The open cache; whoever asked owns it.
        chained: Whether block hashes commit to what precedes their block.
        chunk_tokens: Tokens of a chunk, whole blocks.
        max_sequence_tokens: Tokens beyond which nothing is stored, whole blocks; None is no bound.
        measures_time: Whether metrics hold times.
    """

    cache: KVCache
    chained: bool
    chunk_tokens: int
    max_sequence_tokens: int | None
    measures_time: bool


class _Process:
    """Choices of this process, and what it has been told already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self.choices = Choices()

    def tell_once(self, message: str) -> None:
        with self._lock:
            new = message not in self._told
            self._told.add(message)
        if new:
            _log.warning(message)


_process: Final = _Process()


def configure(
    config: ConfigSource | None = None,
    *,
    namespace: Namespace | None = None,
    block_hashes: HashMeaning = "chained",
) -> None:
    """Say which store the caches of this process use; holds for those opened from now on.

    Args:
        config: A TOML file, a mapping of the same form or a :class:`kvstore.Config`.  None takes
            the file that ``KVSTORE_CONFIG`` names, or else AIBrix's own variables.
        namespace: Model **and revision**.  Its layers and heads come from each cache's tensor spec.
            AIBrix's interface has no place for them; without, models of one shape share blocks,
            which is warned of.
        block_hashes: ``"chained"`` when each hash commits to everything before its block (SGLang,
            vLLM); such a hash stands alone, whatever its prefix is.  ``"content"`` when it names the
            tokens of its block only; then the prefix counts.

    Raises:
        ValueError: ``block_hashes`` is neither.
    """
    if block_hashes not in ("chained", "content"):
        msg = f"block_hashes is {block_hashes!r}; expected 'chained' or 'content'"
        raise ValueError(msg)
    _process.choices = Choices(config, namespace, block_hashes)


def open_store(spec: KVCacheBlockSpec) -> Opened:
    """Open a cache for blocks of ``spec``, by the process's choices and environment.

    Raises:
        ConfigError: A setting is wrong; it names the setting and the value.
        BackendError: A required tier cannot be opened.
        CapacityError: L1 cannot hold one block.
        ValueError: The blocks cannot be stored, for instance because of their dtype.
    """
    choices = _process.choices
    file = os.environ.get(ENVIRONMENT_VARIABLE)
    source = choices.config if choices.config is not None else file
    environment = read_environment(os.environ, with_storage=not source)
    block_spec = _block_spec(spec)
    cache = KVCache.open(
        source or _storage(environment, block_spec), spec=block_spec, namespace=_namespace(choices, environment, spec)
    )
    if environment.unused:
        _process.tell_once(f"these variables are set and have no effect here: {', '.join(environment.unused)}")
    if choices.namespace is None:
        _process.tell_once(
            "model and weights are not known, so models of one shape share blocks; "
            "call kvstore.compat.aibrix.configure(namespace=Namespace(model=..., revision=...))"
        )
    block_tokens = block_spec.block_tokens
    chunk_blocks = max(environment.chunk_tokens // block_tokens, _SMALLEST_CHUNK_BLOCKS)
    bound = environment.max_sequence_tokens
    return Opened(
        cache=cache,
        chained=choices.block_hashes == "chained",
        chunk_tokens=chunk_blocks * block_tokens,
        max_sequence_tokens=None if bound is None else -(-bound // block_tokens) * block_tokens,
        measures_time=environment.measures_time,
    )


def _block_spec(spec: KVCacheBlockSpec) -> BlockSpec:
    tensor = spec.tensor_spec
    return BlockSpec(
        layers=len(tensor.layers),
        kv_heads=len(tensor.heads),
        head_dim=tensor.head_size,
        block_tokens=spec.block_ntokens,
        dtype=str(spec.block_dtype),
        layout=spec.block_layout.name,
    )


def _storage(environment: Environment, spec: BlockSpec) -> dict[str, Any]:
    """The variables as a kvstore config; what they count in tokens becomes bytes."""
    storage = dict(environment.storage)
    if "l2" in storage and environment.inflight_tokens is not None:
        # AIBrix raises the bound to two chunks, so that one chunk can be written while the next comes.
        tokens = max(environment.inflight_tokens, 2 * environment.chunk_tokens)
        queue_bytes = max(1, tokens // spec.block_tokens) * spec.nbytes
        storage["l2"] = [{**tier, "queue": queue_bytes} for tier in storage["l2"]]
    return storage


def _namespace(choices: Choices, environment: Environment, spec: KVCacheBlockSpec) -> Namespace:
    """The given identity, narrowed to the layers and heads that these blocks hold."""
    ranges: dict[str, tuple[int, int]] = {}
    tags = []
    for name, ids in (("layers", spec.tensor_spec.layers), ("kv_heads", spec.tensor_spec.heads)):
        if (whole := _as_range(ids)) is not None:
            ranges[name] = whole
        else:
            tags.append(f"{name}-{hashlib.sha256(repr(list(map(int, ids))).encode()).hexdigest()[:16]}")
    if choices.namespace is None:
        given = Namespace(model=f"aibrix/{environment.namespace}")
    else:
        given = choices.namespace
        tags += [f"namespace-{environment.namespace}"] if environment.namespace != DEFAULT_NAMESPACE else []
    if given.engine_layout is not None:
        tags.insert(0, given.engine_layout)
    return replace(given, **ranges, engine_layout="/".join(tags) or None)  # type: ignore[arg-type]  # ranges are ranges


def _as_range(ids: Sequence[int]) -> tuple[int, int] | None:
    first = int(ids[0])
    return (first, first + len(ids)) if list(map(int, ids)) == list(range(first, first + len(ids))) else None

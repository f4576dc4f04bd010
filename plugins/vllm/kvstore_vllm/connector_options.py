"""What can be set for the connector in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from kvstore.errors import ConfigError
from kvstore.types import Seconds, option
from kvstore_vllm.options import EngineOptions, read_options

SOURCE: Final = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions(EngineOptions):
    """Options of the connector, besides those of every class that vLLM constructs.

    Attributes:
        load: ``"async"`` loads a request's blocks before the request is scheduled; ``"layerwise"`` loads
            them while its first step runs, layer by layer.
        layerwise_save: Copy each layer out right after it was computed, instead of all at the step's end.
        workers: Threads that load; at least 1.
        lookup_wait: Seconds that the scheduler may wait for the answer to a lookup; 0 never waits.
        lookup_ttl: Seconds for which an answer is believed while its request waits to be scheduled.
        on_reset: What a reset of vLLM's caches does to the store.
    """

    load: Literal["async", "layerwise"] = option(
        "async", doc="Load before the request is scheduled (async), or while its first step runs (layerwise)."
    )
    layerwise_save: bool = option(
        default=False, doc="Copy each layer out when it is computed, instead of all at the step's end."
    )
    workers: int = option(4, doc="Threads that load blocks.")
    lookup_wait: Seconds = option(0.0, doc="How long the scheduler may wait for a lookup; 0 never waits.")
    lookup_ttl: Seconds = option(1.0, doc="How long an answer is believed while its request waits.")
    on_reset: Literal["clear", "part", "keep"] = option(
        "clear",
        doc="What a reset of vLLM's caches does: clear this namespace of the store for everybody, part from it "
        "(this engine goes on under a salt of its own), or keep it.",
    )

    def __post_init__(self) -> None:
        super(ConnectorOptions, self).__post_init__()
        if self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: expected at least 1")


def read_connector_options(vllm_config: Any) -> ConnectorOptions:
    """Read the connector's options from vLLM's configuration.

    Raises:
        ConfigError: A value is wrong; the message names the key.
    """
    given = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    return read_options(ConnectorOptions, given, source=SOURCE)

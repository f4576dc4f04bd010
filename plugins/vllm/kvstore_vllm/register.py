"""vLLM's plugin entry point: makes tier and connector known by their short names.

vLLM calls :func:`register` in every process it starts (group ``vllm.general_plugins``), some of them
more than once.
"""

from __future__ import annotations

import importlib
import logging
from typing import Final

logger = logging.getLogger("kvstore.vllm")

TIER: Final = "kvstore"
CONNECTOR: Final = "KVStoreConnector"

# (factory's module, factory, its method, name, module of the class, class)
_REGISTRATIONS: Final = (
    (
        "vllm.v1.kv_offload.tiering.factory",
        "SecondaryTierFactory",
        "register_tier",
        (TIER, "kvstore_vllm.tier", "KVStoreTier"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        "register_connector",
        (CONNECTOR, "kvstore_vllm.connector", "KVStoreConnector"),
    ),
)


def register() -> None:
    """Register with the factories that the installed vLLM has; imports neither tier nor connector.

    Idempotent.  A version without one of the factories is served by the other.
    """
    for module_name, factory_name, method, registration in _REGISTRATIONS:
        try:
            factory = getattr(importlib.import_module(module_name), factory_name)
        except (ImportError, AttributeError) as e:
            logger.debug("this vLLM has no %s: %s", factory_name, e)
            continue
        if registration[0] in getattr(factory, "_registry", ()):
            continue
        getattr(factory, method)(*registration)

"""Every exception kvstore raises, in one tree.

::

    KVStoreError
    ├── ConfigError (ValueError)            a setting is wrong; names file, key path, value, expectation
    │   └── UnknownKeyError                 ... a setting nobody knows; names the nearest one
    ├── PluginError                         a plugin cannot be used
    │   ├── PluginNotFoundError             ... none of that name is installed
    │   ├── PluginConflictError             ... several distributions provide the name
    │   ├── PluginIncompatibleError         ... it speaks another plugin API version
    │   └── PluginLoadError                 ... importing or registering it failed
    ├── KeyMismatchError (ValueError)       a key does not fit this cache (block size, kind, prefix)
    ├── SpecMismatchError (ValueError)      a tensor does not fit the block spec (count, shape, dtype)
    ├── ClosedError                         the cache, backend or lease is closed
    ├── CapacityError                       a request can never fit the configured memory
    ├── DeadlineError (TimeoutError)        flush() ran out of its time
    ├── BackendError                        a medium failed; context says which and how
    │   ├── BackendUnavailableError         ... it cannot be reached
    │   ├── BackendTimeoutError             ... it did not answer in time
    │   ├── BackendPermissionError          ... it refused us
    │   ├── BackendFullError                ... it has no room
    │   └── NotSupportedError               ... the backend lacks that capability
    └── CorruptRecordError                  stored bytes fail verification; ``.reason`` says where

Data calls (get, put, lookup, ...) raise only for misuse: ``ConfigError``, ``KeyMismatchError``,
``SpecMismatchError``, ``ClosedError``, ``CapacityError``.  Whatever a medium does wrong becomes a
miss or a refused put, a counter and a health state.
"""

from __future__ import annotations

from typing import Final, Literal

CorruptReason = Literal["magic", "version", "length", "checksum", "codec", "spec", "key", "tag"]

CORRUPT_REASONS: Final[tuple[CorruptReason, ...]] = (
    "magic",
    "version",
    "length",
    "checksum",
    "codec",
    "spec",
    "key",
    "tag",
)


class KVStoreError(Exception):
    """Root of every exception raised by kvstore."""


class ConfigError(KVStoreError, ValueError):
    """A setting is missing, of the wrong type, out of range or contradicts another one."""


class UnknownKeyError(ConfigError):
    """A setting has a name that nothing in the schema answers to."""


class PluginError(KVStoreError):
    """A plugin cannot be used; the message names distribution and entry point."""


class PluginNotFoundError(PluginError):
    """No installed distribution provides the requested plugin name."""


class PluginConflictError(PluginError):
    """More than one distribution provides the same plugin name."""


class PluginIncompatibleError(PluginError):
    """The plugin was written for another plugin API version."""


class PluginLoadError(PluginError):
    """Importing, validating or registering the plugin failed."""


class KeyMismatchError(KVStoreError, ValueError):
    """A key does not fit the cache or another key: block size, kind or prefix."""


class SpecMismatchError(KVStoreError, ValueError):
    """Tensors do not fit the block spec: count, shape, dtype, or a destination that overlaps itself."""


class ClosedError(KVStoreError):
    """The object was closed (or inherited over a fork) and cannot be used."""


class CapacityError(KVStoreError):
    """A request is larger than the configured memory can ever hold."""


class DeadlineError(KVStoreError, TimeoutError):
    """``flush`` did not finish within its time."""


class BackendError(KVStoreError):
    """A medium failed in a way that no narrower class describes."""


class BackendUnavailableError(BackendError):
    """The medium cannot be reached or opened."""


class BackendTimeoutError(BackendError):
    """The medium did not answer within the deadline."""


class BackendPermissionError(BackendError):
    """The medium refused access: credentials, file modes, read-only mounts."""


class BackendFullError(BackendError):
    """The medium has no room and could not make any."""


class NotSupportedError(BackendError):
    """The backend does not declare the capability that the call needs."""


class CorruptRecordError(KVStoreError):
    """Stored bytes failed verification; internal, a caller of the cache sees a miss.

    Attributes:
        reason: Which check failed first, one of :data:`CORRUPT_REASONS`.
    """

    def __init__(self, reason: CorruptReason, detail: str) -> None:
        super().__init__(f"corrupt record ({reason}): {detail}")
        self.reason: CorruptReason = reason

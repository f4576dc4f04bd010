"""What makes stored bytes interchangeable: named by what they hold, never by who wrote them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Final

from kvstore.keys.digest import KEY_SCHEME_VERSION, check_int, encode_value
from kvstore.spec import BlockSpec

NAMESPACE_BYTES: Final = 16

_TAG: Final = b"kvstore/ns".ljust(16, b"\0")
_MAX_INT: Final = (1 << 31) - 1

IDENTITY_FIELDS: Final = (
    "model",
    "revision",
    "text_config",
    "kv_scales",
    "layers",
    "kv_heads",
    "engine_layout",
    "lossy_codec",
    "key_scheme",
)
"""Fields whose difference separates blocks, in the order they are digested."""

_ENGINE_FIELDS: Final = ("engine", "engine_version")  # identity with include_engine_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Identity of a set of blocks, besides their :class:`~kvstore.BlockSpec` and keys.

    Two caches share blocks exactly when :meth:`digest` is equal.  Salt, adapter and KV group
    belong to keys.  ``None`` is "not said" and differs from every value; empty text is refused.
    Names are arbitrary text and never become part of a path.

    Args:
        model: Model id, such as ``"meta-llama/Llama-3.1-8B"``.
        revision: Fingerprint of the weights: a repository commit, or a digest of the weight index,
            sizes and sampled bytes.  Without it, other weights under the same name would share:
            ``KVCache.open`` warns.
        text_config: Digest of configuration that changes K, such as RoPE scaling.
        kv_scales: Digest of the scales of scaled 8-bit KV.
        layers: Half-open range of the model's layers that a block holds; ``None`` is all.
        kv_heads: Half-open range of the model's KV heads that a block holds; ``None`` is all.
        engine_layout: Tag of a layout that the spec cannot say, such as a packed fp8 row.
        lossy_codec: Id of the lossy codec that the bytes went through; ``None`` is bit-exact.
        key_scheme: Version of the digests in keys.
        engine: Name of the engine that writes; descriptive.
        engine_version: Its version; descriptive unless ``include_engine_version``.
        rank: Rank of the writer; descriptive, like the rest.
        world_size: Number of ranks.
        host: Host name of the writer.
        include_engine_version: Make ``engine`` and ``engine_version`` part of the identity.

    Raises:
        TypeError: A field is of another type.
        ValueError: A field is empty or out of range, or the engine version is to be included but
            not given.

    Example:
        >>> spec = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
        >>> Namespace(model="smollm2-135m", revision="93efa2f0").digest(spec).hex()
        '1d066717a06523cba388f2871bcd8131'
    """

    model: str
    revision: str | None = None
    text_config: str | None = None
    kv_scales: str | None = None
    layers: tuple[int, int] | None = None
    kv_heads: tuple[int, int] | None = None
    engine_layout: str | None = None
    lossy_codec: int | None = None
    key_scheme: int = KEY_SCHEME_VERSION
    engine: str | None = None
    engine_version: str | None = None
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    include_engine_version: bool = field(default=False)

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        for name in ("revision", "text_config", "kv_scales", "engine_layout", "engine", "engine_version", "host"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        for name, low in (("lossy_codec", 0), ("rank", 0), ("world_size", 1)):
            if getattr(self, name) is not None:
                check_int(f"Namespace.{name}", getattr(self, name), low, _MAX_INT)
        check_int("Namespace.key_scheme", self.key_scheme, 1, _MAX_INT)
        for name in ("layers", "kv_heads"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checked_range(name, getattr(self, name)))
        if not isinstance(self.include_engine_version, bool):
            raise TypeError(
                f"Namespace.include_engine_version is {self.include_engine_version!r}; expected True or False"
            )
        if self.include_engine_version and self.engine_version is None:
            raise ValueError("Namespace.include_engine_version is set, but engine_version is not; give engine_version")

    @property
    def revision_known(self) -> bool:
        """Whether the weights are identified, not just their name."""
        return self.revision is not None

    @property
    def identity_fields(self) -> tuple[str, ...]:
        """Names of the fields that separate blocks; all others only describe."""
        return IDENTITY_FIELDS + (_ENGINE_FIELDS if self.include_engine_version else ())

    def digest(self, spec: BlockSpec) -> bytes:
        """The 16 bytes that stand for this namespace in every stored name and record.

        SHA-256 over tag, spec fingerprint and each identity field that is set, as framed name and
        framed value, cut to 16 bytes.  Fields not set leave no trace, so that a field added later
        does not make old blocks unreachable.
        """
        h = hashlib.sha256(_TAG + encode_value(spec.fingerprint()))
        for name in self.identity_fields:
            value = getattr(self, name)
            if value is None:
                continue
            h.update(encode_value(name))
            for part in value if isinstance(value, tuple) else (value,):
                h.update(encode_value(part))
        return h.digest()[:NAMESPACE_BYTES]

    def diff(self, other: Namespace) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, as ``name: (own value, other's value)``; identity fields first."""
        order = sorted((f.name for f in fields(self)), key=lambda name: name not in self.identity_fields)
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in order}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def describe(self, spec: BlockSpec) -> dict[str, Any]:
        """Everything about the namespace in JSON types, for people and tools.

        Returns:
            ``digest`` in hex, ``identity`` and ``descriptive`` fields (``None`` when not said) and
            the ``spec``'s fields with its fingerprint.
        """
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        identity = {name: values.pop(name) for name in self.identity_fields}
        return {
            "digest": self.digest(spec).hex(),
            "identity": identity,
            "descriptive": values,
            "spec": {**asdict(spec), "fingerprint": spec.fingerprint().hex()},
        }

    def to_json(self, spec: BlockSpec) -> str:
        """:meth:`describe` as JSON text: the readable copy kept beside the data."""
        return json.dumps(self.describe(spec), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Namespace:
        """Read what :meth:`to_json` wrote; the spec in it is left to the caller.

        Raises:
            ValueError: The text is not such JSON, or names fields that this version does not know.
        """
        try:
            document = json.loads(text)
        except RecursionError:
            raise ValueError("not a namespace document: it is nested without end") from None
        sections = (
            [document.get(name) for name in ("identity", "descriptive")] if isinstance(document, dict) else [None]
        )
        if not all(isinstance(section, dict) for section in sections):
            raise ValueError("not a namespace document: expected an object with 'identity' and 'descriptive' objects")
        values: dict[str, Any] = {}
        for section in sections:
            values.update({name: tuple(v) if isinstance(v, list) else v for name, v in (section or {}).items()})
        unknown = sorted(values.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(
                f"namespace document has unknown fields {', '.join(unknown)}; a newer kvstore may have written it"
            )
        try:
            return cls(**values)
        except TypeError as e:
            raise ValueError(f"namespace document is not valid: {e}") from e


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or isinstance(value, Enum):
        raise TypeError(f"Namespace.{name} is {value!r}; expected text")
    if not value:
        raise ValueError(
            f"Namespace.{name} is empty; expected text" + ("" if name == "model" else ", or None when not known")
        )


def _checked_range(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Namespace.{name} is {value!r}; expected (first, stop)")
    first, stop = value
    check_int(f"Namespace.{name}[0]", first, 0, _MAX_INT)
    check_int(f"Namespace.{name}[1]", stop, first + 1, _MAX_INT)
    return first, stop


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def cautions(namespace: Namespace) -> list[str]:
    """What whoever opens a cache for ``namespace`` should be told once."""
    told = []
    if not namespace.revision_known:
        told.append(
            f"namespace of model {namespace.model!r} has no revision: "
            "other weights under that name would share its blocks"
        )
    if namespace.key_scheme != KEY_SCHEME_VERSION:
        told.append(
            f"namespace of model {namespace.model!r} is for key scheme {namespace.key_scheme}, this release makes keys "
            f"by scheme {KEY_SCHEME_VERSION}: nothing that was stored under that scheme will be found (a cold start)"
        )
    return told

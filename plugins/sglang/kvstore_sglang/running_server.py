"""What the SGLang process that we run in says about itself and its model."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from kvstore.engines.model_files import ModelFiles, find_model
from kvstore.fingerprint import fingerprint_config
from kvstore_sglang.identity import Model
from kvstore_sglang.options import Options


def running_model(options: Options, served_name: str | None) -> Model:
    """Identify the model from the options first, then from the server's arguments and its files.

    Outside of a server (tests, scripts) only the options and ``served_name`` count.

    Args:
        options: What the user said.
        served_name: The model name that SGLang gives its storage backends.
    """
    server = _Server()
    path = server.text("model_path")
    files = find_model(path, server.text("revision")) if path else ModelFiles("", None, None)
    scales = server.text("quantization_param_path")
    return Model(
        name=options.model or served_name or path or "",
        revision=options.revision or files.revision,
        text_config=options.text_config or _text_config(server, files),
        kv_scales=options.kv_scales or (file_digest(scales) if scales else None),
        kv_heads=_kv_heads(files),
        draft=options.draft_revision or _draft(server),
        engine_version=_version(),
    )


def text_config(fields: dict[str, Any], overrides: str, context_tokens: int | None) -> str:
    """Digest of what changes K besides the weights.

    Args:
        fields: The model's ``config.json``.
        overrides: SGLang's ``--json-model-override-args``.
        context_tokens: SGLang's ``--context-length``: some kinds of RoPE scale with it.
    """
    given = {"sglang_overrides": overrides} if overrides.strip() not in ("", "{}") else {}
    length = {} if context_tokens is None else {"sglang_context_length": context_tokens}
    return fingerprint_config(fields | given | length)


def file_digest(path: str) -> str | None:
    """SHA-256 (hex) of a small file; None when it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


class _Server:
    """SGLang's settings in this process: resolved ones first, then what was typed; none when no server runs in it."""

    def __init__(self) -> None:
        from sglang.srt import runtime_context

        self._sources: list[Any] = []
        for name in ("get_model", "get_spec", "get_server_args"):
            try:
                self._sources.append(getattr(runtime_context, name)())
            except (AttributeError, ValueError):  # of another version; not published in this process
                continue

    def get(self, name: str) -> Any:
        """A setting, None when it is not known."""
        for source in self._sources:
            try:
                return getattr(source, name)
            except AttributeError:
                continue
        return None

    def text(self, name: str) -> str | None:
        """A setting that is text and not empty."""
        value = self.get(name)
        return value if isinstance(value, str) and value else None


def _text_config(server: _Server, files: ModelFiles) -> str | None:
    if files.fields is None:
        return None
    return text_config(files.fields, server.text("json_model_override_args") or "", server.get("context_length"))


def _kv_heads(files: ModelFiles) -> int | None:
    fields = files.fields or {}
    nested = fields.get("text_config")
    for where in (nested, fields):
        heads = where.get("num_key_value_heads") if isinstance(where, dict) else None
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


def _draft(server: _Server) -> str | None:
    path = server.text("speculative_draft_model_path")
    if path is None:
        return None
    return find_model(path, server.text("speculative_draft_model_revision")).revision or path


def _version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None

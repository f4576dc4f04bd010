"""Command-line options of the demo."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError

_TOKENS: Final = 2048
_SHORT_TOKENS: Final = 300
_MIN_TOKENS: Final = 200  # the chat template, the first section of the document and a question
_MAX_TOKENS: Final = 8000  # the model's context is 8,192
_MIN_RATIO: Final = 10.0  # what kvstore promises for the default document
_DTYPES: Final = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo was asked to do.

    Attributes:
        synthetic: Generated blocks instead of a model.
        tokens: Length of the first prompt, about.
        new_tokens: Tokens of an answer, at most.
        min_ratio: How many times faster the restored run must be; 0 does not check.
        dtype: ``bfloat16``, the model's own, or ``float32``.
        report: Folder for the report.
        store: Folder for the demo's store.
        as_json: Print one JSON document instead of text.
    """

    synthetic: bool
    tokens: int
    new_tokens: int
    min_ratio: float
    dtype: str
    report: Path
    store: Path
    as_json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to its parser."""
    parser.add_argument("--short", action="store_true", help=f"a document of {_SHORT_TOKENS} tokens and short answers")
    parser.add_argument("--synthetic", action="store_true", help="generated blocks instead of a model; a few seconds")
    parser.add_argument("--tokens", type=int, metavar="N", help=f"length of the prompt (default {_TOKENS})")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="bfloat16",
        help="bfloat16 is the model's own (default); CPUs without bfloat16 instructions compute faster in float32",
    )
    parser.add_argument(
        "--min-ratio",
        type=float,
        metavar="X",
        help=f"fail unless restoring is X times faster than computing (default {_MIN_RATIO:g}; 0 with --short)",
    )
    parser.add_argument("--report", type=Path, default=Path("demo-report"), metavar="DIR", help="default demo-report")
    parser.add_argument("--store", type=Path, metavar="DIR", help="default: in the user's cache folder; emptied first")


def options_of(args: argparse.Namespace) -> DemoOptions:
    """Check parsed arguments.

    Raises:
        ConfigError: ``--tokens`` is out of range.
    """
    tokens = args.tokens if args.tokens is not None else _SHORT_TOKENS if args.short else _TOKENS
    if not _MIN_TOKENS <= tokens <= _MAX_TOKENS:
        msg = f"--tokens is {tokens}; expected {_MIN_TOKENS} to {_MAX_TOKENS}"
        raise ConfigError(msg)
    # A short document is over in a moment either way, so its ratio says little.
    default_ratio = 0.0 if args.short or tokens < _TOKENS else _MIN_RATIO
    return DemoOptions(
        synthetic=args.synthetic,
        tokens=tokens,
        new_tokens=16 if args.short else 32,
        min_ratio=default_ratio if args.min_ratio is None else args.min_ratio,
        dtype=args.dtype,
        report=args.report,
        store=args.store or cache_folder() / "demo-store",
        as_json=bool(getattr(args, "json", False)),
    )


def cache_folder() -> Path:
    """The user's cache folder for this project: ``$XDG_CACHE_HOME`` or ``~/.cache``, plus its name."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llm-kvstore"

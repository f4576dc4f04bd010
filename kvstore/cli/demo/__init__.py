"""``kvstore demo``: a real model answers from KV cache that another process computed."""

from __future__ import annotations

from kvstore.cli.demo.command import run
from kvstore.cli.demo.options import add_arguments

__all__ = ["add_arguments", "run"]

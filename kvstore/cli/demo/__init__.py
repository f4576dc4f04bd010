"""``kvstore demo``: a real model answers from KV cache that another process computed."""

from __future__ import annotations

from kvstore.cli.demo.options import add_arguments
from kvstore.cli.demo.run import run

__all__ = ["add_arguments", "run"]

"""The ``kvstore`` command: one module per subcommand, nothing heavy imported before one runs."""

from __future__ import annotations

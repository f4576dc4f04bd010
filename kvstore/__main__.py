"""``python -m kvstore`` is the ``kvstore`` command."""

from __future__ import annotations

import sys

from kvstore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

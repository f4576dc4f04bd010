"""Runs a phase of the demo in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstore.cli.demo.errors import DemoError

STEP: Final = "step: "
_TAIL_LINES: Final = 15


def run_phase(phase: str, job: dict[str, Any], *, on_step: Callable[[str], None], show_stderr: bool = False) -> Any:
    """Run ``phase`` in a new Python process and return what it measured.

    Args:
        phase: Name of a phase of :mod:`kvstore.cli.demo.worker`.
        job: Its arguments, in JSON types.
        on_step: Called with each thing the process says it is doing.
        show_stderr: Let the process write to this process's standard error (progress bars);
            otherwise it is kept and shown only when the process fails.

    Raises:
        DemoError: The process failed; the message holds the end of its standard error.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "kvstore.cli.demo.worker", phase, str(job_file), str(result_file)]
        with (Path(folder) / "stderr").open("w+", encoding="utf-8", errors="replace") as kept:
            process = subprocess.Popen(  # noqa: S603 - our own module, arguments made above
                command,
                stdout=subprocess.PIPE,
                stderr=None if show_stderr else kept,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                text=True,
            )
            with process:
                for line in process.stdout or ():
                    if line.startswith(STEP):
                        on_step(line.removeprefix(STEP).rstrip())
            kept.seek(0)
            tail = "".join(kept.readlines()[-_TAIL_LINES:])
        if process.returncode or not result_file.exists():
            msg = f"phase {phase!r} of the demo failed with exit status {process.returncode}\n{tail}".rstrip()
            raise DemoError(msg)
        return json.loads(result_file.read_text(encoding="utf-8"))

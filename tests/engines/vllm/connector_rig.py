"""Starts scenarios of the connector in fresh processes and reads what they report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]

# One unbound thread each: a tiny model gains nothing from two, and waits for both on a busy machine.
_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario under way.

    Attributes:
        process: The child.
        log: Its output.
        result: Where it reports.
    """

    process: subprocess.Popen[bytes]
    log: Path
    result: Path

    def report(self, timeout_s: float = 400.0) -> dict[str, Any]:
        """Wait for the end; the child is killed when it does not come."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # vLLM's own processes too: the child leads a session
            self.process.wait(30)
            code = None
        text = self.log.read_text(errors="replace")
        assert code == 0, f"exit code {code} (None: still running after {timeout_s:.0f} s):\n{text[-8000:]}"
        report: dict[str, Any] = json.loads(self.result.read_text())
        report["log"] = text
        return report


def lmdb_config(folder: Path) -> dict[str, Any]:
    """A store of one LMDB tier whose blocks lie on the medium as they are."""
    return {"l2": [{"backend": "lmdb", "path": str(folder), "capacity": "256MiB", "codec": "none"}]}


def start(scenario: str, folder: Path, job: Mapping[str, Any], *, multiprocess: bool = False) -> Scenario:
    """Start a scenario in a process of its own.

    Args:
        scenario: A function of :mod:`tests.engines.vllm.connector_scenarios`.
        folder: For its files; a new one.
        job: What it is to do.
        multiprocess: Let vLLM run its core in a process of its own, as ``vllm serve`` does.
    """
    folder.mkdir()
    job_file, result, log = folder / "job.json", folder / "result.json", folder / "log"
    job_file.write_text(json.dumps({"extra": {}, "llm": {}, **job}))
    variables = {**os.environ, **_VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess))}
    command = [sys.executable, "-m", "tests.engines.vllm.connector_child", scenario, str(job_file), str(result)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Scenario(process, log, result)

"""The demo's child processes: ``python -m kvstore.cli.demo.worker PHASE JOB RESULT``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.cli.demo.model import OFFLINE
from kvstore.cli.demo.processes import STEP


def _convert(job: dict[str, Any]) -> Any:
    from kvstore.cli.demo import model

    _say("converting the model (once)")
    model.convert(model.find_source(), Path(job["model"]))
    return {}


def _compute(job: dict[str, Any]) -> Any:
    from kvstore.cli.demo import answering

    return answering.compute(answering.Job(**job), _say)


def _restore(job: dict[str, Any]) -> Any:
    from kvstore.cli.demo import answering

    return answering.restore(answering.Job(**job), _say)


def _synthetic_put(job: dict[str, Any]) -> Any:
    from kvstore.cli.demo import synthetic

    return synthetic.put(Path(job["store"]), job["n_blocks"], _say)


def _synthetic_restore(job: dict[str, Any]) -> Any:
    from kvstore.cli.demo import synthetic

    return synthetic.restore(Path(job["store"]), job["n_blocks"], _say)


_PHASES: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "convert": _convert,
    "compute": _compute,
    "restore": _restore,
    "synthetic-put": _synthetic_put,
    "synthetic-restore": _synthetic_restore,
}


def _say(step: str) -> None:
    print(f"{STEP}{step}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run one phase and write its result as JSON."""
    phase, job_file, result_file = arguments
    os.environ.update(OFFLINE)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    Path(result_file).write_text(json.dumps(_PHASES[phase](job)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Coverage-guided fuzzing: ``python tests/fuzz/run_atheris.py TARGET [--seconds N | --runs N]``.

``TARGET`` is one of :data:`tests.fuzz.targets.TARGETS`, or ``all`` for each in turn.  Starts from the
seeds and the corpus of the target, in a folder that is removed at the end.  What breaks a law is written
to ``--artefacts`` (default ``tests/fuzz/artefacts``) and ends the run with another status than 0;
``--replay FILE`` runs such a file alone, with the whole traceback.  ``--keep`` adds to the corpus the
smallest inputs that reach lines nothing else there reaches.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, too

PACKAGES: Final = ("kvstore", "kvstore_lmdb", "kvstore_nvme", "kvstore_s3", "kvstore_zstd", "kvstore_aesgcm")
MAX_INPUT_BYTES: Final = 1 << 17
KEPT: Final = 12
"""Most inputs that one ``--keep`` adds."""

KEPT_BYTES: Final = 4096


def fuzz_each(names: str, work: Path, artefacts: Path, limits: list[str]) -> int:
    """Fuzz one target, or all one after the other in forks: instrumenting takes longer than short runs do."""
    import atheris  # type: ignore[import-untyped]  # it has no stubs

    with atheris.instrument_imports(include=list(PACKAGES)):  # nothing of them is imported before
        from tests.fuzz.targets import TARGETS, find
    worst = 0
    for name in TARGETS if names == "all" else [names]:
        own = work / name
        own.mkdir()
        pid = os.fork()
        if pid == 0:
            fuzz(find(name), own, artefacts, limits)
        worst = max(worst, abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        sys.stderr.write(f"{name}: {'a law broke' if worst else 'all laws held'}\n")
        if worst:
            break
    return worst


def fuzz(target: Target, work: Path, artefacts: Path, limits: list[str]) -> NoReturn:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    for data in target.inputs():
        (work / hashlib.sha256(data).hexdigest()).write_bytes(data)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.randrange(3) == 0:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(rng, bytes(data))[:max_size]

    options = ["-timeout=60", "-rss_limit_mb=3072", f"-max_len={MAX_INPUT_BYTES}", "-print_final_stats=1"]
    command = ["run_atheris", *options, *limits, f"-artifact_prefix={artefacts}/", str(work)]
    atheris.Setup(command, target, custom_mutator=mutated)
    atheris.Fuzz()
    os._exit(0)  # Fuzz does not come back


def run(name: str, artefacts: Path, limits: list[str], *, keep: bool) -> int:
    """Fuzz in a child, since libFuzzer ends its process; return its status."""
    artefacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-fuzz-") as folder:
        work, scratch = Path(folder, "work"), Path(folder, "scratch")
        work.mkdir()
        scratch.mkdir()
        command = [sys.executable, __file__, name, "--work", str(work), "--artefacts", str(artefacts), *limits]
        # libFuzzer ends its process at once: what the targets leave behind goes with this folder
        environment = {**os.environ, "TMPDIR": str(scratch)}
        status = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False).returncode
        for found in work.iterdir() if keep and status == 0 else ():
            keep_new(found.name, [path.read_bytes() for path in found.iterdir()])
    return status


def keep_new(name: str, found: list[bytes]) -> None:
    """Add the smallest inputs that reach new lines to the corpus."""
    from tests.fuzz.targets import CORPUS, find

    target = find(name)
    reached: set[tuple[str, int]] = set()
    for data in target.inputs():
        reached |= lines_of(target, data)
    added = 0
    for data in sorted(found, key=len):
        new = lines_of(target, data) - reached if len(data) <= KEPT_BYTES and added < KEPT else set()
        if new:
            reached |= new
            added += 1
            path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            sys.stdout.write(f"{path}: {len(new)} lines\n")


def lines_of(target: Target, data: bytes) -> set[tuple[str, int]]:
    """Lines of the project's packages that an input runs."""
    lines: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, _event: str, _arg: object) -> Any:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        return local if name in PACKAGES else None

    sys.settrace(enter)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return lines


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=int)
    limit.add_argument("--runs", type=int)
    parser.add_argument("--artefacts", type=Path, default=Path(__file__).parent / "artefacts")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replay is not None:
        from tests.fuzz.targets import find

        find(args.target)(args.replay.read_bytes())
        return 0
    if args.work is not None:
        flags = [f"-runs={args.runs}"] if args.runs is not None else [f"-max_total_time={args.seconds or 60}"]
        return fuzz_each(args.target, args.work, args.artefacts, flags)
    limits = ["--runs", str(args.runs)] if args.runs is not None else ["--seconds", str(args.seconds or 60)]
    return run(args.target, args.artefacts, limits, keep=args.keep)


if __name__ == "__main__":
    sys.exit(main())

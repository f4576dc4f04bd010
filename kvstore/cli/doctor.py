"""``kvstore doctor``: what is wrong with a config's media, what to do about it, and how fast they are."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvstore.backend import Backend, BackendContext, Finding
from kvstore.cli.bounded import bounded
from kvstore.cli.command import (
    EXIT_FINDINGS,
    EXIT_OK,
    Command,
    Subcommands,
    add_command,
    bytes_argument,
    count_argument,
    exit_code_of,
)
from kvstore.cli.output import plural, print_json
from kvstore.errors import ConfigError, KVStoreError, PluginError

if TYPE_CHECKING:
    from kvstore.cli.loading import LoadVerdict, PromptBlocks
    from kvstore.cli.selftest import Timings
    from kvstore.config import TierConfig
    from kvstore.plugins import Registry

_DESCRIPTION = """\
Looks at the medium of every tier of a config and says what is wrong with it and what to do: file
system, room, permissions, limits of the process, and for object stores credentials, bucket, region
and clock. A tier without a problem is then opened as a cache would open it, which creates a store
where none is, and a self-test with a few records, deleted again, is timed. A medium that hangs is
reported, not waited for. From the timing follows whether loading the KV of a prompt is faster than
computing it, or for which engines it is. Ends with exit code 1 when there is a problem, and with 3 when a tier
cannot be opened or does not answer; warnings alone end with 0. Secrets are not shown."""

_LOOK_S: Final = 15.0  # a plugin's diagnose ends within about 10 s
_OPEN_S: Final = 30.0  # checking a large store after a crash takes some seconds
_CLOSE_S: Final = 6.0  # a backend closes within 5 s
_FACTS_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Engine:
    """For whom a tier is judged.

    Attributes:
        prefill_tokens_per_s: How fast it computes; 0 when that is not known.
        blocks: What it stores; None for what the store says.
    """

    prefill_tokens_per_s: float = 0.0
    blocks: PromptBlocks | None = None


@dataclass(slots=True)
class Checkup:
    """What was found out about one tier; ``exit_code`` is the worst of it."""

    tier: str
    backend: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    timings: Timings | None = None
    load: LoadVerdict | None = None
    exit_code: int = EXIT_OK

    def add(self, *findings: Finding) -> None:
        """Note findings; a problem makes the tier one to look after."""
        self.findings += findings
        if any(finding.level == "problem" for finding in findings):
            self.exit_code = max(self.exit_code, EXIT_FINDINGS)

    def failed(self, error: KVStoreError) -> None:
        """Note that a step could not be done at all; a message that a finding has said already is not repeated."""
        if str(error) not in {finding.what for finding in self.findings}:
            self.findings.append(Finding("problem", str(error)))
        self.exit_code = max(self.exit_code, exit_code_of(error))

    @property
    def conclusions(self) -> list[Finding]:
        """Findings and the verdict about loading."""
        return self.findings if self.load is None else [*self.findings, self.load.finding()]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "tier": self.tier,
            "backend": self.backend,
            "exit_code": self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": self.facts,
            "self_test": None if self.timings is None else self.timings.as_dict(),
            "load": None if self.load is None else self.load.as_dict(),
        }


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="doctor",
            summary="examine the media of a config, with a timed self-test",
            description=_DESCRIPTION,
            examples=(
                ("kvstore doctor kvstore.toml", "every tier of a config"),
                ("kvstore doctor kvstore.toml --tier s3", "only the bucket"),
                ("kvstore doctor kvstore.toml --prefill-tokens-per-s 8000", "load or recompute, for that engine"),
                ("kvstore doctor kvstore.toml --json | jq '.tiers[].self_test'", "bandwidths, for programs"),
            ),
            run=_run,
        ),
    )
    parser.add_argument("file", nargs="?", metavar="CONFIG", help="config file (the one that KVSTORE_CONFIG names)")
    parser.add_argument("--tier", metavar="NAME", help="only this tier")
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=count_argument,
        metavar="N",
        help="how fast the engine computes (gate.prefill_tokens_per_s of the config)",
    )
    parser.add_argument(
        "--block-bytes", type=bytes_argument, metavar="SIZE", help="of a block (what the store keeps, or an example)"
    )
    parser.add_argument("--block-tokens", type=count_argument, metavar="N", help="tokens of a block")


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.coding import coding_findings
    from kvstore.cli.host import host_findings
    from kvstore.cli.store import chosen
    from kvstore.config import load_config
    from kvstore.plugins import Registry

    registry = Registry.discover()
    config = load_config(args.file, registry)
    tiers = chosen(config, args.tier)
    engine = _engine(args, config.gate.prefill_tokens_per_s)
    host = Checkup("", "")
    host.add(*host_findings(config))
    host.add(*(_step(host, "trying codecs and keys", _LOOK_S, lambda: coding_findings(config, registry)) or ()))
    checkups = []
    if not args.json:
        print("\n".join(["host", *_finding_lines(host.findings)]))
    for tier in tiers:
        checkups.append(examine(tier, registry, engine))
        if not args.json:
            print("\n".join(_lines(checkups[-1])), flush=True)
    if args.json:
        findings = [asdict(finding) for finding in host.findings]
        print_json({"host": findings, "tiers": [checkup.as_dict() for checkup in checkups]})
    else:
        print(_summary([finding for checkup in (host, *checkups) for finding in checkup.conclusions]))
    return max(checkup.exit_code for checkup in (host, *checkups))


def _engine(args: argparse.Namespace, configured_tokens_per_s: float) -> Engine:
    from kvstore.cli.loading import PromptBlocks

    if (args.block_bytes is None) != (args.block_tokens is None):
        msg = "--block-bytes and --block-tokens say something together only; give both, or neither"
        raise ConfigError(msg)
    blocks = None if args.block_bytes is None else PromptBlocks(args.block_bytes, args.block_tokens, "as asked for")
    return Engine(args.prefill_tokens_per_s or configured_tokens_per_s, blocks)


def examine(tier: TierConfig, registry: Registry, engine: Engine | None = None) -> Checkup:
    """Look at one tier's medium, then open, test and close it; raises nothing that a backend does."""
    checkup = Checkup(tier.name, tier.backend)
    context = _context(tier, checkup)
    plugin = registry.backend(tier.backend)
    if plugin.diagnose is not None:
        diagnose = plugin.diagnose
        found = _step(checkup, "looking at the medium", _LOOK_S, lambda: list(diagnose(context)))
        checkup.add(*(found or ()))
    if checkup.exit_code == EXIT_OK:
        _use(checkup, registry.create_backend(tier.backend), context, engine or Engine())
    return _without_secrets(checkup, tier)


def _use(checkup: Checkup, backend: Backend, context: BackendContext, engine: Engine) -> None:
    from kvstore.cli.selftest import SelfTest

    def open_backend() -> bool:
        backend.open(context)
        return True

    if _step(checkup, "opening", _OPEN_S, open_backend):
        test = SelfTest(backend, context.capacity_bytes)
        # the self-test bounds each of its calls; this bound is for a backend that no call ends
        tested = _step(checkup, "self-test", 12 * _LOOK_S, test.run)
        if tested is not None:
            checkup.timings, findings = tested
            checkup.add(*findings)
            checkup.facts = _step(checkup, "describing", _FACTS_S, backend.describe) or {}
            _judge(checkup, backend, engine)
    _step(checkup, "closing", _CLOSE_S, backend.close)


def _judge(checkup: Checkup, backend: Backend, engine: Engine) -> None:
    """Say whether loading a prompt pays; a store that describes no namespace is judged by an example."""
    from kvstore.cli.loading import PromptBlocks, judge, stored_blocks

    if checkup.timings is None:
        return
    blocks = engine.blocks
    if blocks is None:
        blocks = stored_blocks(_step(checkup, "reading descriptions", _FACTS_S, backend.namespaces) or ())
    checkup.load = judge(checkup.timings, blocks or PromptBlocks(), engine.prefill_tokens_per_s)


def _step(checkup: Checkup, what: str, limit_s: float, step: Any) -> Any:
    """Run one step; whatever goes wrong becomes a finding and None."""
    try:
        return bounded(what, limit_s, step)
    except KVStoreError as e:
        checkup.failed(e)
    except Exception as e:  # noqa: BLE001 - border: a plugin's bug is a finding about the plugin
        error = PluginError(f"backend {checkup.backend!r} raised {type(e).__name__} in {what}: {e}")
        checkup.failed(error)
    return None


class _Collector(logging.Handler):
    """Turns what a backend logs into findings."""

    def __init__(self, checkup: Checkup) -> None:
        super().__init__(logging.WARNING)
        self._checkup = checkup

    def emit(self, record: logging.LogRecord) -> None:
        self._checkup.add(Finding("warning", record.getMessage()))


def _context(tier: TierConfig, checkup: Checkup) -> BackendContext:
    logger = logging.Logger("kvstore.doctor")  # of its own, so that nothing is printed in between  # noqa: LOG001
    logger.addHandler(_Collector(checkup))
    return BackendContext(
        tier=tier.name,
        options=tier.options,
        capacity_bytes=tier.capacity,
        durability=tier.durability,
        logger=logger,
    )


def _without_secrets(checkup: Checkup, tier: TierConfig) -> Checkup:
    """Take the values of secret options out of what a plugin said."""
    from kvstore.config.place import without_secrets
    from kvstore.plugins.options import option_fields

    secret = [o.name for o in option_fields(type(tier.options)) if o.secret]
    values = [str(value) for name in secret if (value := getattr(tier.options, name))]

    def clean(text: str) -> str:
        return without_secrets(text, values)

    checkup.findings = [Finding(f.level, clean(f.what), clean(f.advice)) for f in checkup.findings]
    checkup.facts = {name: clean(value) for name, value in checkup.facts.items()}
    return checkup


def _lines(checkup: Checkup) -> Iterator[str]:
    yield f"tier {checkup.tier!r} ({checkup.backend})"
    yield from _finding_lines(checkup.findings)
    if checkup.timings is not None:
        yield from _finding_lines([Finding("ok", checkup.timings.text)])
    if checkup.load is not None:
        yield from _finding_lines([checkup.load.finding()])
    for name, value in checkup.facts.items():
        yield f"  {name}: {value}"


def _finding_lines(findings: list[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"  {finding.level:<8} {finding.what}"
        if finding.advice:
            yield f"           -> {finding.advice}"


def _summary(findings: list[Finding]) -> str:
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count("problem"), levels.count("warning")
    if not problems and not warnings:
        return "nothing is wrong"
    return f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}"

"""``kvstore doctor`` on sound, sick, hanging and lying media."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore.backend import Backend, BackendContext, Finding, PutItem, Receive
from kvstore.cli import doctor, selftest
from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from kvstore.cli.doctor import Checkup, examine
from kvstore.cli.host import available_bytes, host_findings
from kvstore.cli.main import main
from kvstore.config import Config, L1Config, load_config
from kvstore.errors import BackendPermissionError, BackendUnavailableError
from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin, Registry
from kvstore.types import Call, Presence, PutStatus, ReadStatus, option

SECRET = "hunter2-hunter2"  # noqa: S105 - of nothing


@dataclass(frozen=True, slots=True)
class Options:
    token: str = option("", doc="A password.", secret=True)


Diagnose = Callable[[BackendContext], Sequence[Finding]]


def examined(backend: type[Backend], diagnose: Diagnose | None = None, token: str = "") -> Checkup:
    """Examine a tier of a backend that is registered for this test only."""
    module = ModuleType("doubles")

    @hookimpl
    def kvstore_register_backends() -> list[BackendPlugin]:
        return [BackendPlugin(name="sick", options=Options, factory=backend, summary="A double.", diagnose=diagnose)]

    module.kvstore_register_backends = kvstore_register_backends  # type: ignore[attr-defined]
    registry = Registry.discover()
    registry.register(module, "sick")
    config = load_config({"l2": [{"backend": "sick", "token": token}]}, registry)
    return examine(config.l2[0], registry)


def problems(checkup: Checkup) -> list[Finding]:
    return [finding for finding in checkup.findings if finding.level == "problem"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "k.toml"
    path.write_text(
        f'[l1]\ncapacity = "1MiB"\n[[l2]]\nbackend = "lmdb"\npath = "{tmp_path}/store"\ncapacity = "64MiB"\n'
    )
    return path


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What a hanging medium waits for; let go at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_a_sound_tier_is_measured_and_nothing_stays_in_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "--json"]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    (tier,) = report["tiers"]
    assert {finding["level"] for finding in report["host"] + tier["findings"]} == {"ok"}
    assert tier["self_test"]["records"] == 8
    assert tier["self_test"]["put_mb_s"] > 0
    assert tier["self_test"]["get_mb_s"] > 0
    assert tier["facts"]["access"] == "read-write"
    assert main(["stat", str(config), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)[0]["usage"]["records"] == 0


def test_people_see_findings_timings_and_a_verdict(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config)]) == EXIT_OK
    text = capsys.readouterr().out
    assert text.startswith("host\n")
    assert "tier 'lmdb' (lmdb)\n" in text
    assert "self-test with 8 records of " in text
    assert text.endswith("nothing is wrong\n")


def test_a_tier_with_a_problem_is_not_opened(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = config.parent / "store" / "data.mdb"
    damaged.parent.mkdir(mode=0o700)
    damaged.write_bytes(b"\xa5" * 100_000)
    assert main(["doctor", str(config)]) == EXIT_FINDINGS
    assert "is damaged" in capsys.readouterr().out
    assert damaged.read_bytes() == b"\xa5" * 100_000, "the doctor must not set it aside"


def test_tiers_are_chosen_by_name(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text() + '[[l2]]\nbackend = "memory"\n')
    assert main(["doctor", str(config), "--tier", "memory"]) == EXIT_OK
    assert "'lmdb'" not in capsys.readouterr().out
    assert main(["doctor", str(config), "--tier", "disk"]) == EXIT_USAGE
    assert "its tiers: lmdb, memory" in capsys.readouterr().err


def test_a_config_that_is_wrong_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.toml")]) == EXIT_USAGE
    assert "no such file" in capsys.readouterr().err


def test_what_a_plugin_finds_is_shown_with_its_advice(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Finding("problem", "HEAD bucket 'kv': 403 AccessDenied", "grant s3:ListBucket on arn:aws:s3:::kv")
    checkup = examined(MemoryBackend, lambda _: [Finding("ok", "endpoint answers"), refused])
    assert checkup.exit_code == EXIT_FINDINGS
    assert problems(checkup) == [refused]
    assert checkup.timings is None
    lines = "\n".join(doctor._lines(checkup))
    assert "problem  HEAD bucket 'kv': 403 AccessDenied\n           -> grant s3:ListBucket" in lines


def test_warnings_alone_are_success() -> None:
    checkup = examined(MemoryBackend, lambda _: [Finding("warning", "slow disk")])
    assert checkup.exit_code == EXIT_OK
    assert checkup.timings is not None


def test_what_a_backend_logs_is_a_finding() -> None:
    class Talking(MemoryBackend):
        def open(self, context: BackendContext) -> None:
            super().open(context)
            context.logger.warning("%s is crowded", context.tier)

    assert Finding("warning", "sick is crowded") in examined(Talking).findings


def test_secrets_are_hidden_wherever_a_plugin_puts_them() -> None:
    class Chatty(MemoryBackend):
        def open(self, context: BackendContext) -> None:
            super().open(context)
            context.logger.warning("using %s", context.options.token)

        def describe(self) -> dict[str, str]:
            return {"credentials": SECRET}

    checkup = examined(Chatty, lambda c: [Finding("warning", f"token {c.options.token}", SECRET)], SECRET)
    shown = json.dumps(checkup.as_dict()) + "\n".join(doctor._lines(checkup))
    assert SECRET not in shown
    assert "token ***" in shown


def test_a_medium_that_hangs_while_looked_at_is_reported(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_LOOK_S", 0.2)

    def look(_: BackendContext) -> list[Finding]:
        never.wait(60)
        return []

    checkup = examined(MemoryBackend, look)
    assert checkup.exit_code == EXIT_UNAVAILABLE
    assert [finding.what for finding in problems(checkup)] == ["looking at the medium: no answer within 0.2 s"]


@pytest.mark.parametrize("step", ["open", "put_many", "get_many", "exists_many", "delete_many", "close"])
def test_a_step_that_hangs_is_reported_and_left(
    step: str, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: Any) -> None:
        never.wait(60)

    monkeypatch.setattr(selftest, "_LIMIT_S", 0.2)
    for limit in ("_OPEN_S", "_CLOSE_S"):
        monkeypatch.setattr(doctor, limit, 0.2)
    sick = type("Hanging", (MemoryBackend,), {step: hang})
    checkup = examined(sick)
    assert checkup.exit_code == EXIT_UNAVAILABLE
    assert any("no answer within 0.2 s" in finding.what for finding in problems(checkup))


def test_a_plugin_that_raises_something_else_is_named_as_broken() -> None:
    class Buggy(MemoryBackend):
        def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
            raise KeyError(names[0][:1])

    checkup = examined(Buggy)
    assert checkup.exit_code == EXIT_USAGE
    assert "backend 'sick' raised KeyError in self-test" in problems(checkup)[0].what


def test_a_tier_that_cannot_be_opened_says_why() -> None:
    class Locked(MemoryBackend):
        def open(self, context: BackendContext) -> None:
            raise BackendPermissionError("uid 7 may not write to /srv; chown it")

    checkup = examined(Locked)
    assert checkup.exit_code == EXIT_UNAVAILABLE
    assert [finding.what for finding in checkup.findings] == ["uid 7 may not write to /srv; chown it"]


@pytest.mark.parametrize("status", [s for s in PutStatus if s not in {PutStatus.STORED, PutStatus.EXISTS}])
def test_refused_records_are_a_problem_with_advice(status: PutStatus) -> None:
    class Refusing(MemoryBackend):
        def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
            return [status] * len(items)

    (finding,) = problems(examined(Refusing))
    assert finding.what.endswith(f"refused: {status.value}")
    assert finding.advice


def test_other_bytes_than_were_stored_are_a_problem() -> None:
    class Torn(MemoryBackend):
        def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
            def tear(i: int, view: memoryview) -> None:
                receive(i, memoryview(bytes(view[:-1]) + b"\0\0"))

            return super().get_many(names, tear, call)

    assert "other bytes came back" in problems(examined(Torn))[0].what


def test_records_that_are_lost_at_once_are_a_problem() -> None:
    class Forgetting(MemoryBackend):
        def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
            return [ReadStatus.ABSENT] * len(names)

    assert "gave absent" in problems(examined(Forgetting))[0].what


def test_deletes_that_do_nothing_are_told() -> None:
    class Keeping(MemoryBackend):
        def delete_many(self, names: Sequence[bytes], call: Call) -> int:
            return 0

    checkup = examined(Keeping)
    assert checkup.exit_code == EXIT_OK
    assert [f.what for f in checkup.findings if f.level == "warning"] == [
        "self-test: deleted records are still said to be there"
    ]


def test_a_failing_medium_is_reported_by_its_own_message() -> None:
    class Broken(MemoryBackend):
        def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
            raise BackendUnavailableError("EIO on /dev/sdx")

    checkup = examined(Broken)
    assert checkup.exit_code == EXIT_UNAVAILABLE
    assert problems(checkup) == [Finding("problem", "EIO on /dev/sdx")]


def test_memory_is_bounded_by_machine_and_control_group(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 100 kB\nMemAvailable:  64 kB\n")
    assert available_bytes(memory, tmp_path) == 64 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert available_bytes(memory, tmp_path) == 64 << 10
    (tmp_path / "memory.max").write_text(f"{32 << 10}\n")
    assert available_bytes(memory, tmp_path) == 31 << 10
    assert available_bytes(tmp_path / "none", tmp_path / "none") == 0


def test_an_l1_larger_than_memory_is_a_problem() -> None:
    (finding, _) = host_findings(Config(l1=L1Config(capacity=1 << 60)))
    assert finding.level == "problem"
    assert "lower l1.capacity" in finding.advice
    assert len(host_findings(Config(l1=L1Config(enabled=False)))) == 1

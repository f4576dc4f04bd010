"""How numbers, tables and progress look."""

from __future__ import annotations

import sys

import pytest

from kvstore.cli.output import age, plural, printable, progress, ratio, size, table


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (368640, "360 KiB"),
        (50 << 30, "50.0 GiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_sizes_have_binary_units(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (172800, "2 d")]
)
def test_ages_have_their_largest_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_ratio_of_nothing_is_a_dash() -> None:
    assert ratio(145, 100) == "1.450"
    assert ratio(0, 0) == "-"


def test_one_is_singular() -> None:
    assert [plural(n, "record") for n in (0, 1, 1000)] == ["0 records", "1 record", "1,000 records"]


def test_what_others_wrote_is_shown_without_control_characters() -> None:
    assert printable("model/ä-1\x1b[2J\n\u202e") == "model/ä-1?[2J??"
    assert len(printable("x" * 1000)) == 160


def test_table_aligns_and_leaves_no_trailing_blanks() -> None:
    assert table([("A", "N"), ("long", "7"), ("x", "100")], right=(1,)) == ["A       N", "long    7", "x     100"]


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("verify", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_progress_counts_in_place_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress("verify", 1000, shown=True) as advance:
        advance(400)
        advance(600)
    assert capsys.readouterr().err == "\rverify: 400 of 1,000\rverify: 1,000 of 1,000\n"


def test_progress_bar_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("verify", 10, shown=True) as advance:
        advance(10)
    assert capsys.readouterr().out == ""

"""Options: checked when the backend is made, tolerant of what is SGLang's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from kvstore_sglang.options import SGLANG_KEYS, Options

from kvstore.errors import ConfigError


def test_sglangs_own_keys_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert Options.read(dict.fromkeys(SGLANG_KEYS, 1)) == Options()
    assert Options.read({"file_storage_path": "/x", "whatever": {"a": 1}}) == Options()
    assert not caplog.records


@pytest.mark.parametrize(("slip", "meant"), [("revison", "revision"), ("Config", "config"), ("kv_scale", "kv_scales")])
def test_a_slip_of_ours_is_named(slip: str, meant: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Options.read({slip: "x"})
    assert [r.getMessage() for r in caplog.records] == [
        f"hicache-storage-backend-extra-config: unknown key {slip!r} is ignored; did you mean {meant!r}?"
    ]


@pytest.mark.parametrize(("name", "value"), [("model", 1), ("revision", ""), ("config", 7), ("config", "")])
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*expected"):
        Options.read({name: value})


def test_a_salt_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Options.read({"salt": 12345})
    assert "12345" not in str(caught.value)

"""What can be written in vLLM's configuration, and what is said about the rest."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from kvstore_vllm.options import EngineOptions, TierOptions, read_options

from kvstore import ConfigError

MEMORY: dict[str, Any] = {"l2": [{"backend": "memory", "capacity": "1MiB"}]}


def test_values_are_read_with_units() -> None:
    options = read_options(
        TierOptions, {"config": MEMORY, "lookup_ttl": "500ms", "workers": 2, "revision": "r"}, source="tier"
    )
    assert (options.config, options.lookup_ttl, options.workers, options.revision) == (MEMORY, 0.5, 2, "r")


def test_unknown_keys_are_one_warning_that_names_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options = read_options(
            TierOptions, {"revison": "r", "new_in_vllm": object(), "mine": 1}, source="tier 'kvstore'", ignore=("mine",)
        )
    assert options == TierOptions()
    (record,) = caplog.records
    text = record.getMessage()
    assert "tier 'kvstore'" in text
    assert "'revison'; did you mean 'revision'?" in text
    assert "'new_in_vllm'" in text
    assert "'mine'" not in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"workers": 0}, "workers = 0: expected at least 1"),
        ({"workers": "four"}, "workers"),
        ({"on_reset": "forget"}, "on_reset"),
        ({"revision": ""}, "revision = ''"),
        ({"config": 7}, "config = 7"),
        ({"allow_weak_hashes": "yes"}, "allow_weak_hashes"),
    ],
    ids=str,
)
def test_a_wrong_value_fails_loudly_naming_the_option(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        read_options(TierOptions, given, source="tier")
    assert "tier" in str(caught.value)


def test_a_secret_salt_is_not_shown() -> None:
    assert "hush" not in repr(EngineOptions(salt="hush"))

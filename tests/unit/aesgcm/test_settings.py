"""Keys and inner codec are checked when the codec is made."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys

import pytest
from kvstore_aesgcm import hooks
from kvstore_aesgcm.options import AesGcmOptions

from kvstore.codec import CodecContext
from kvstore.errors import ConfigError
from tests.unit.aesgcm.sealing import KEY_1, KEY_2, codec_of, keys


def make(**options: object) -> object:
    (plugin,) = hooks.kvstore_register_codecs()
    return plugin.factory(CodecContext(AesGcmOptions(**options), lambda _: None))  # type: ignore[arg-type]


def test_without_a_key_nothing_is_made() -> None:
    with pytest.raises(ConfigError, match=r"codecs\.aes-gcm\.keys is empty; expected \"file:PATH\""):
        make()


@pytest.mark.parametrize("inner", ["planets", "aes-gcm", ""])
def test_an_inner_codec_that_cannot_be_is_told(inner: str) -> None:
    with pytest.raises(ConfigError, match=r"codecs\.aes-gcm\.inner"):
        make(keys=keys((1, KEY_1)), inner=inner)


def test_the_keys_are_the_same_for_every_thread_whatever_the_source_says_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TEST_PASSING", KEY_1)
    options = AesGcmOptions(keys=("env:KVSTORE_TEST_PASSING",))
    first = options.keyring
    monkeypatch.delenv("KVSTORE_TEST_PASSING")
    assert options.keyring is first
    with pytest.raises(ConfigError, match="KVSTORE_TEST_PASSING"):
        _ = dataclasses.replace(options).keyring


def test_options_and_codec_show_no_key() -> None:
    options = AesGcmOptions(keys=keys((1, KEY_1), (2, KEY_2)))
    codec = codec_of((1, KEY_1), (2, KEY_2))
    shown = [repr(options), repr(options.keyring), repr(codec), repr(vars(options)), repr([*options.keyring])]
    for key in (KEY_1, KEY_2):
        material = repr(bytes.fromhex(key))[2:-1]
        assert [text for text in shown if key[:8] in text or material[:8] in text] == []


WITHOUT = """
import sys
sys.modules["cryptography"] = None
from kvstore.codec import CodecContext
from kvstore.errors import ConfigError
from kvstore_aesgcm import hooks
(plugin,) = hooks.kvstore_register_codecs()
try:
    plugin.factory(CodecContext(plugin.options(), lambda _: None))
except ConfigError as e:
    print(e)
"""


def test_without_the_package_cryptography_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'llm-kvstore[encryption]'" in done.stdout
    assert importlib.util.find_spec("cryptography") is not None

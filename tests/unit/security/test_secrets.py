"""A secret is shown to nobody: not by what prints a config, not by an error, not in a log, not on the medium."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvstore_lmcache.options
import kvstore_sglang.options
import kvstore_vllm.options
import pytest
import torch

from kvstore import KVCache, KVCacheKey
from kvstore.cli.main import main
from kvstore.config import load_config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.plugins import Registry
from kvstore.plugins.options import option_fields
from tests.faults.media import MEDIA
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.faults.store import TIER
from tests.support_faults import NAMESPACE, SMALL, noise, same, target, unrelated
from tests.support_s3 import free_ports

SHOWN_CHARACTERS = 8  # nobody may see so many of them in a row
MATERIAL = bytes.fromhex("5ec7e7c0ffee0123456789abcdef00112233445566778899aabbccddeeff1234")
HEX = MATERIAL.hex()
SALT = "tenant-4711-do-not-show"
S3_SECRETS = {
    "access_key_id": "AKIAVERYSECRETIDENT0",
    "secret_access_key": "wJalrXUtnFEMIverySECRETbPxRfiCY",
    "session_token": "FwoGZXIvYXdzEsecretSESSIONtoken",
}


def key_function() -> str:
    """A source of a key."""
    return HEX


def key_too_short() -> bytes:
    """A source that gives something else."""
    return MATERIAL[:20]


def key_that_fails() -> bytes:
    """A source that fails."""
    raise RuntimeError("the vault is closed")


@dataclass
class Everything:
    """What was shown, by where."""

    texts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, where: str, what: object) -> None:
        self.texts.append((where, what if isinstance(what, str) else repr(what)))

    def add_error(self, where: str, error: BaseException) -> None:
        """The message, and the traceback that a program without a handler prints."""
        self.add(where, str(error))
        self.add(where, "".join(traceback.format_exception(error)))

    def showing(self, *secrets: str | bytes) -> list[tuple[str, str]]:
        """Where a part of a secret can be read."""
        parts = {
            text[at : at + SHOWN_CHARACTERS]
            for secret in secrets
            for text in ([secret] if isinstance(secret, str) else [repr(secret)[2:-1], secret.hex(), str([*secret])])
            for at in range(max(1, len(text) - SHOWN_CHARACTERS + 1))
        }
        assert all(len(part) == SHOWN_CHARACTERS for part in parts)
        return [(where, part) for where, text in self.texts for part in parts if part in text]


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> Callable[[], Everything]:
    """What was logged at any level, and printed, besides what a test adds."""
    caplog.set_level(logging.DEBUG, "kvstore")
    everything = Everything()

    def collect() -> Everything:
        out, err = capsys.readouterr()
        for where, text in (("log", caplog.text), ("output", out), ("errors", err)):
            everything.add(where, text)
        return everything

    return collect


def use(everything: Everything, config: dict[str, Any], *, hits: bool = True) -> None:
    """Open a cache, use it, and ask for everything that it says about itself."""
    try:
        cache = KVCache.open(config, spec=SMALL, namespace=NAMESPACE)
    except KVStoreError as e:
        everything.add_error("open", e)
        return
    with cache:
        cache.put(unrelated(1), noise(SMALL, [1]))
        cache.flush(30)
        out = target(SMALL)
        assert not hits or cache.get(unrelated(1), out) == 1
        assert not hits or same(out, noise(SMALL, [1]))
        everything.add("explain", [*cache.explain(unrelated(1)), *cache.explain(unrelated(2))])
        everything.add("stats", json.dumps(cache.stats().to_dict(), default=repr) + repr(cache.stats()))
        everything.add("health", json.dumps(cache.health().to_dict(), default=repr) + repr(cache.health()))
        everything.add("repr", [cache, cache.config, cache.config.l2, dict(cache.config.codecs)])
        everything.add("describe", [t.tier.backend.describe() for t in cache._use().stack.tiers])


def toml_of(config: dict[str, Any]) -> str:
    sections = "".join(f"[{name}]\n{toml_lines(values)}\n" for name, values in flat(config) if values)
    return sections + "".join(f"[[l2]]\n{toml_lines(tier)}\n" for tier in config["l2"])


def flat(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("l1", "defaults"):
        yield name, config.get(name, {})
    for name, values in config.get("codecs", {}).items():
        yield f"codecs.{name}", values


def toml_lines(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def run_tools(path: Path) -> None:
    """What people run on a config."""
    for command in (["config", "check", str(path)], ["doctor", str(path)], ["stat", "--config", str(path)]):
        for more in ([], ["--json"]):
            with contextlib.suppress(SystemExit):
                main([*command, *more])


# -- keys


def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    as_bytes, as_text = tmp_path / "key.bin", tmp_path / "key.txt"
    as_bytes.write_bytes(MATERIAL)
    as_text.write_text(HEX + "\n")
    for path in (as_bytes, as_text):
        path.chmod(0o600)
    monkeypatch.setenv("KVSTORE_TEST_SECRET", HEX)
    return {
        "binary file": f"file:{as_bytes}",
        "text file": f"3=file:{as_text}",
        "environment": "env:KVSTORE_TEST_SECRET",
        "function": f"call:{__name__}:key_function",
    }


@pytest.mark.parametrize("source", ["binary file", "text file", "environment", "function"])
def test_a_key_is_shown_nowhere_while_it_is_used(
    source: str, seen: Callable[[], Everything], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [sources(tmp_path, monkeypatch)[source]]
    config = {
        "l1": {"enabled": False},
        "defaults": {"record_keys": given},
        "codecs": {"aes-gcm": {"keys": given}},
        "l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "codec": "aes-gcm", "capacity": "8MiB"}],
    }
    file = tmp_path / "kvstore.toml"
    file.write_text(toml_of(config))
    everything = seen()
    use(everything, config)
    everything.add("config", [load_config(file), load_config(file).to_toml()])
    run_tools(file)
    for path in (tmp_path / "store").rglob("*.json"):
        everything.add("namespace", path.read_text())
    everything = seen()
    assert len(everything.texts) > 10
    assert everything.showing(HEX, MATERIAL) == []
    everything.add("a slip", f"... {HEX[20:40]} ...")
    assert everything.showing(HEX, MATERIAL) != []  # it would be seen


BAD_KEYS: dict[str, Callable[[Path], str]] = {
    "the key itself": lambda folder: HEX,
    "the key itself with an id": lambda folder: f"2={HEX}",
    "a file with too much": lambda folder: f"file:{folder}/long",
    "a file with other text": lambda folder: f"file:{folder}/text",
    "a variable that is cut off": lambda folder: "env:KVSTORE_TEST_SHORT",
    "a function with too little": lambda folder: f"call:{__name__}:key_too_short",
    "a function that fails": lambda folder: f"call:{__name__}:key_that_fails",
    "no such file": lambda folder: f"file:{folder}/none",
}


@pytest.mark.parametrize("option", ["defaults.record_keys", "codecs.aes-gcm.keys"])
@pytest.mark.parametrize("bad", BAD_KEYS)
def test_a_key_that_is_none_is_told_without_showing_it(
    bad: str, option: str, seen: Callable[[], Everything], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long").write_bytes(MATERIAL * 2)
    (tmp_path / "text").write_text(f"key: {HEX}")
    monkeypatch.setenv("KVSTORE_TEST_SHORT", HEX[:-1])
    good = [f"call:{__name__}:key_function"]
    wrong = [BAD_KEYS[bad](tmp_path)]
    of_records = option == "defaults.record_keys"
    config = {
        "defaults": {"record_keys": wrong if of_records else good},
        "codecs": {"aes-gcm": {"keys": good if of_records else wrong}},
        "l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "codec": "aes-gcm"}],
    }
    file = tmp_path / "kvstore.toml"
    file.write_text(toml_of(config))
    everything = seen()
    with pytest.raises(ConfigError, match=option.replace(".", r"\.")) as caught:
        KVCache.open(str(file), spec=SMALL, namespace=NAMESPACE)
    everything.add_error("open", caught.value)
    with contextlib.suppress(ConfigError):
        everything.add("config", repr(load_config(file)))
    assert not (tmp_path / "store").exists()
    run_tools(file)
    assert seen().showing(HEX, MATERIAL) == []


# -- credentials


def s3_config(url: str, **options: Any) -> dict[str, Any]:
    tier = {"backend": "s3", "name": TIER, "bucket": "faults", "endpoint_url": url, "admit": "all", "deadline": 1.0}
    tier |= options
    return {"l1": {"enabled": False}, "l2": [tier]}


def test_credentials_are_shown_nowhere(seen: Callable[[], Everything], tmp_path: Path) -> None:
    everything = seen()
    file = tmp_path / "kvstore.toml"
    with S3FaultServer("faults") as server:
        config = s3_config(server.url, **S3_SECRETS)
        file.write_text(toml_of(config))
        use(everything, config)
        with server.faulty(Fault("forbid")):
            use(everything, config, hits=False)
            run_tools(file)
        run_tools(file)
        everything.add("config", [load_config(file), load_config(file).l2[0].options])
        lying = b"".join(stored.body for bucket in server.buckets.values() for stored in bucket.values())
        everything.add("bucket", lying.decode("latin-1"))
    nowhere = s3_config(f"http://127.0.0.1:{free_ports(1)[0]}", **S3_SECRETS)
    use(everything, nowhere, hits=False)
    assert len(seen().texts) > 8
    assert everything.showing(*S3_SECRETS.values()) == []


@pytest.mark.parametrize("wrong", [
    {"secret_access_key": [S3_SECRETS["secret_access_key"]]},
    {"access_key_id": None, "secret_acces_key": S3_SECRETS["secret_access_key"]},
    {"session_token": {"is": S3_SECRETS["session_token"]}},
    {"endpoint_url": f"http://user:{S3_SECRETS['secret_access_key']}@127.0.0.1:9000"},
])  # fmt: skip
def test_a_credential_in_the_wrong_place_is_told_without_showing_it(
    wrong: dict[str, Any], seen: Callable[[], Everything]
) -> None:
    config = s3_config("http://127.0.0.1:9", **{**S3_SECRETS, **wrong})
    config["l2"][0] = {key: value for key, value in config["l2"][0].items() if value is not None}
    everything = seen()
    with pytest.raises(ConfigError) as caught:
        KVCache.open(config, spec=SMALL, namespace=NAMESPACE)
    everything.add_error("open", caught.value)
    assert seen().showing(*S3_SECRETS.values()) == []


# -- declarations


OPTIONS = {
    "kvstore_sglang.options": "Options",
    "kvstore_vllm.options": "TierOptions",
    "kvstore_vllm.connector_options": "ConnectorOptions",
    "kvstore_lmcache.options": "Options",
}


@pytest.mark.parametrize("module", OPTIONS)
def test_a_salt_is_not_in_the_repr_of_an_engines_options(module: str) -> None:
    cls = getattr(importlib.import_module(module), OPTIONS[module])
    options = cls(salt=SALT)
    assert options.salt == SALT
    assert SALT[:SHOWN_CHARACTERS] not in repr(options)


@pytest.mark.parametrize("module", OPTIONS)
def test_an_engines_options_do_not_show_the_config_that_is_written_into_them(module: str) -> None:
    """An inline config may hold credentials."""
    cls = getattr(importlib.import_module(module), OPTIONS[module])
    options = cls(config=s3_config("http://127.0.0.1:9", **S3_SECRETS))
    shown = Everything()
    shown.add("repr", options)
    assert options.config["l2"][0]["session_token"] == S3_SECRETS["session_token"]
    assert shown.showing(*S3_SECRETS.values()) == []


READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "sglang": kvstore_sglang.options.Options.read,
    "lmcache": lambda given: kvstore_lmcache.options.read_options(given, "extra_config"),
    "vllm": lambda given: kvstore_vllm.options.read_options(
        kvstore_vllm.options.TierOptions, given, source="secondary tier"
    ),
}


@pytest.mark.parametrize("engine", READERS)
def test_an_engines_salt_of_the_wrong_type_is_told_without_showing_it(engine: str) -> None:
    given = {"salt": [SALT]}
    with pytest.raises(ConfigError, match="salt") as caught:
        READERS[engine](given)
    shown = Everything()
    shown.add_error("error", caught.value)
    assert shown.showing(SALT) == []


def test_a_salt_is_not_in_the_repr_of_a_key_nor_in_its_errors() -> None:
    key = KVCacheKey.from_tokens(range(64), block_tokens=16, salt=SALT)
    shown = Everything()
    shown.add("repr", [key, key[1:], key.suffix(2), [*key]])
    with pytest.raises((TypeError, ValueError)) as caught:
        KVCacheKey.from_tokens(range(64), block_tokens=16, salt=[SALT])  # type: ignore[arg-type]
    shown.add_error("wrong type", caught.value)
    config = {"l1": {"capacity": "1MiB"}, "l2": [{"backend": "memory", "capacity": "1MiB"}]}
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE) as cache:
        wrong = KVCacheKey.from_tokens(range(64), block_tokens=32, salt=SALT)
        with pytest.raises(ValueError, match="block") as caught:
            cache.get(wrong, target(SMALL, 2))
        shown.add("misuse", str(caught.value))
    assert shown.showing(SALT) == []


HARMLESS = {
    "sse_kms_key_id": "the number of a key, not the key",
    "keys": "says where keys are; what has not that form is refused without showing it",
    "record_keys": "likewise",
    "require_salt": "a switch",
}


def test_every_option_that_sounds_like_a_secret_is_declared_one() -> None:
    registry = Registry.discover()
    schemas = [registry.backend(name).options for name in registry.names("backend")]
    schemas += [o for name in registry.names("codec") if (o := registry.codec(name).options) is not None]
    schemas += [type(load_config({"l2": [{"backend": "memory"}]}).defaults)]
    sounding = [
        option
        for schema in schemas
        for option in option_fields(schema)
        if any(word in option.name for word in ("key", "secret", "token", "password", "salt", "credential"))
        and "tokens" not in option.name
    ]
    assert {option.name for option in sounding} >= {*S3_SECRETS, *HARMLESS}
    assert [option.name for option in sounding if not option.secret and option.name not in HARMLESS] == []


def test_every_secret_option_is_kept_out_of_repr() -> None:
    registry = Registry.discover()
    checked = 0
    for name in registry.names("backend"):
        schema = registry.backend(name).options
        secret = {option.name for option in option_fields(schema) if option.secret}
        shown = {one.name for one in dataclasses.fields(schema) if one.repr}
        assert not secret & shown, name
        checked += len(secret)
    assert checked >= len(S3_SECRETS)


@pytest.mark.parametrize("kind", [kind for kind in MEDIA if kind != "s3"])
def test_no_salt_lies_on_the_medium(kind: str, tmp_path: Path) -> None:
    """It is in the digest of a key and nowhere else."""
    store = MEDIA[kind].make(tmp_path / "store")
    key = KVCacheKey.from_tokens(range(SMALL.block_tokens), block_tokens=SMALL.block_tokens, salt=SALT)
    with store.open() as cache:
        cache.store(key, noise(SMALL, [1]))
        assert cache.fetch(key) is not None
    lying = b"".join(path.read_bytes() for path in store.root.rglob("*") if path.is_file())
    assert noise(SMALL, [1]).view(torch.uint8).numpy().tobytes()[:16] in lying  # what is there is found
    assert SALT.encode()[:SHOWN_CHARACTERS] not in lying
    store.close()

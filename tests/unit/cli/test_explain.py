"""``kvstore explain`` on every medium that keeps data at rest: each planted cause is named, in text and JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from kvstore.cli.main import main
from kvstore.cli.store import Named, sites
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.stateful.media import Place
from tests.support import blocks_of
from tests.unit.cli.stores import damage, fill
from tests.unit.cli.stores import key as key_of_stores

SPEC = BlockSpec(layers=4, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")
NAMESPACE = Namespace(model="m", revision="r1")
TOKENS = list(range(16 * 20))
KEY = KVCacheKey.from_tokens(TOKENS, block_tokens=16)  # a pack of 16 and one of 4, where there are packs


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def put(
    config: Path,
    key: KVCacheKey = KEY,
    *,
    namespace: Namespace = NAMESPACE,
    spec: BlockSpec = SPEC,
    hole: slice | None = None,
) -> None:
    """Store blocks as a cache does, and wait for the description, which may come in the background."""
    with KVCache.open(config, spec=spec, namespace=namespace) as cache:
        assert cache.put(key, blocks_of(spec, len(key))) == len(key)
        cache.flush(20)
        if hole is not None:
            cache.delete(key[hole])
        deadline = time.monotonic() + 10
        while namespace.digest(spec).hex() not in known(config) and time.monotonic() < deadline:
            time.sleep(0.02)


def known(config: Path) -> set[str]:
    (site,) = sites(Named(str(config)))
    with site.opened() as store:
        return {json.loads(text)["digest"] for text in store.backend.namespaces()}


def causes(report: Any) -> list[str]:
    """Of the only tier, folded: each run of equal causes once, with its length."""
    (tier,) = report["tiers"]
    folded: list[list[Any]] = []
    for i, block in enumerate(tier["blocks"]):
        assert block["index"] == i
        if folded and folded[-1][0] == block["cause"]:
            folded[-1][1] += 1
        else:
            folded.append([block["cause"], 1])
    return [f"{cause} {count}" for cause, count in folded]


def detail(report: Any, i: int = 0) -> str:
    return str(report["tiers"][0]["blocks"][i]["detail"])


def explain(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = EXIT_OK) -> Any:
    assert main(["explain", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = EXIT_OK) -> str:
    assert main(["explain", *arguments]) == code
    return capsys.readouterr().out


def test_a_whole_prompt_is_present(config: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(config)
    report = explain(capsys, str(config), "--tokens", prompt)
    assert causes(report) == ["present 20"]
    assert (report["block_tokens"], report["blocks"], report["reachable_blocks"]) == (16, 20, 20)
    block = report["tiers"][0]["blocks"][3]
    assert block["digest"] == KEY[3].hex()
    assert block["stored_bytes"] > 1000
    assert time.time() - 600 < block["written"] <= time.time()
    text = told(capsys, str(config), "--tokens", prompt)
    assert "0-19    present" in text
    assert text.endswith("a read delivers the whole prompt: 320 tokens\n")


def test_what_is_behind_a_hole_is_told_from_what_is_gone(
    config: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with KVCache.open(config, spec=SPEC, namespace=NAMESPACE) as cache:
        packs = cache.config.l2[0].backend == "s3" or "tree" in config.read_text()
    put(config, hole=slice(3, 4))
    report = explain(capsys, str(config), "--tokens", prompt)
    if packs:  # the blocks of a pack go together
        assert causes(report) == ["vanished 16", "behind_a_hole 4"]
        assert report["reachable_blocks"] == 0
    else:
        assert causes(report) == ["present 3", "vanished 1", "behind_a_hole 16"]
        assert "block 3" in detail(report, 4)
        assert told(capsys, str(config), "--tokens", prompt).endswith("the first 3 blocks: 48 of 320 tokens\n")


def test_a_tail_that_is_not_there_is_absent(config: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(config, KEY[:16])
    report = explain(capsys, str(config), "--tokens", prompt)
    assert causes(report) == ["present 16", "not_stored 4"]
    assert "tails first" in detail(report, 16)


def test_another_revision_and_another_dtype_are_named(
    config: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(config, namespace=replace(NAMESPACE, revision="r2"))
    put(config, KVCacheKey.from_tokens(range(16), block_tokens=16))
    report = explain(capsys, str(config), "--tokens", prompt, "--namespace", NAMESPACE.digest(SPEC).hex()[:8])
    assert causes(report) == ["present 1", "namespace_differs 19"]
    assert detail(report, 1).endswith("they differ in revision: 'r1' asked for, 'r2' there")


def test_blocks_of_another_length_are_named(config: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    longer = replace(SPEC, block_tokens=32)
    put(config, KVCacheKey.from_tokens(TOKENS, block_tokens=32), spec=longer)
    put(config, KVCacheKey.from_tokens([7] * 16, block_tokens=16))
    report = explain(capsys, str(config), "--tokens", prompt, "--namespace", NAMESPACE.digest(SPEC).hex())
    assert causes(report) == ["namespace_differs 20"]
    assert "spec.block_tokens: 16 asked for, 32 there" in detail(report)


def test_a_salt_that_the_writer_did_not_have_is_named(
    config: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(config)
    report = explain(capsys, str(config), "--tokens", prompt, "--salt", "tenant", "--adapter", "a@1")
    assert causes(report) == ["key_differs 20"]
    assert "without salt and adapter" in detail(report)


def test_the_right_salt_adapter_and_group_find_the_prompt_and_wrong_ones_say_what_to_check(
    config: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(config, KVCacheKey.from_tokens(TOKENS, block_tokens=16, salt="tenant", adapter="a@1", group=2))
    right = ("--salt", "tenant", "--adapter", "a@1", "--group", "2")
    assert causes(explain(capsys, str(config), "--tokens", prompt, *right)) == ["present 20"]
    report = explain(capsys, str(config), "--tokens", prompt)
    assert causes(report) == ["not_stored 20"]
    assert "salt" in detail(report)


@pytest.mark.parametrize("kind", ["bytes", "text", "int"])
def test_hashes_of_an_engine_are_found_as_what_they_are(
    config: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    makers: dict[str, Any] = {"bytes": lambda i: bytes([i]) * 32, "text": lambda i: f"{i:064x}", "int": lambda i: i + 1}
    hashes: Sequence[Any] = [makers[kind](i) for i in range(6)]
    put(config, KVCacheKey.from_block_hashes(hashes, block_tokens=16, chained=True))
    path = tmp_path / "hashes.txt"
    path.write_text("\n".join(h.hex() if isinstance(h, bytes) else str(h) for h in hashes))
    found = causes(explain(capsys, str(config), "--hashes", str(path), "--hash-type", kind))
    assert found == ["present 6"]
    assert causes(explain(capsys, str(config), "--hashes", str(path), "--hash-type", kind, "--unchained")) == [
        "not_stored 6"
    ]


def test_a_store_that_nobody_wrote_to_says_so(config: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    with KVCache.open(config, spec=SPEC, namespace=NAMESPACE):
        pass
    report = explain(capsys, str(config), "--tokens", prompt)
    assert report["reachable_blocks"] == 0
    text = told(capsys, str(config), "--tokens", prompt)
    assert "the tier is empty" in text or "nothing was stored here yet" in text


# -- one medium is enough


@pytest.fixture
def store(tmp_path: Path) -> str:
    fill(tmp_path / "store")
    return str(tmp_path / "store")


def test_one_block_tells_its_place_and_what_is_before_it(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    digests = [digest.hex() for digest in key_of_stores().digests]
    assert "it is block 2 of its prompt, and all blocks before it are there" in told(capsys, store, digests[2])
    assert "nothing stands before it" in told(capsys, digests[0], store)
    assert "it is not here" in told(capsys, store, "0" * 64)


def test_one_block_behind_a_missing_one_says_which(config_of_lmdb: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(config_of_lmdb, hole=slice(5, 6))
    text = told(capsys, str(config_of_lmdb), KEY[9].hex())
    assert "it is block 9 of its prompt, but block 5 before it is missing" in text


@pytest.fixture
def config_of_lmdb(tmp_path: Path) -> Path:
    path = tmp_path / "lmdb.toml"
    path.write_text(f'[l1]\nenabled = false\n[[l2]]\nbackend = "lmdb"\ncapacity = "64MiB"\npath = "{tmp_path}/lmdb"\n')
    return path


def test_damage_is_corrupt_and_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = fill(tmp_path / "store")
    damage(tmp_path / "store", names[1], 1000)
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(map(str, range(48))))
    report = explain(capsys, str(tmp_path / "store"), "--tokens", str(path), code=EXIT_FINDINGS)
    assert causes(report) == ["present 1", "corrupt 1", "behind_a_hole 1"]
    assert "checksum" in detail(report, 1)


def test_several_tiers_are_read_as_one(tmp_path: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [
        f'[[l2]]\nname = "{n}"\nbackend = "lmdb"\npath = "{tmp_path}/{n}"\nadmit = "all"' for n in ("first", "second")
    ]
    for name, part in (("first", KEY[:8]), ("second", KEY[8:12])):
        alone = tmp_path / f"{name}.toml"
        alone.write_text("\n".join(["[l1]", "enabled = false", tiers[name == "second"]]))
        put(alone, part)
    both = tmp_path / "both.toml"
    both.write_text("\n".join(["[l1]", "enabled = false", *tiers]))
    assert explain(capsys, str(both), "--tokens", prompt)["reachable_blocks"] == 12
    assert explain(capsys, str(both), "--tokens", prompt, "--tier", "first")["reachable_blocks"] == 8


def test_which_of_several_namespaces_is_meant_has_to_be_said(
    config_of_lmdb: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(config_of_lmdb)
    put(config_of_lmdb, namespace=Namespace(model="another", revision="r1"))
    assert main(["explain", str(config_of_lmdb), "--tokens", prompt]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert "--namespace" in message
    assert "model another, revision r1" in message
    assert causes(explain(capsys, str(config_of_lmdb), "--tokens", prompt, "--namespace", "another")) == ["present 20"]
    assert causes(explain(capsys, str(config_of_lmdb), KEY[0].hex())) == ["present 1"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("[1, 2", ["--tokens", "FILE"], "JSON"),
        ("1 2 x", ["--tokens", "FILE"], "item 2 is 'x'"),
        ("[1, true]", ["--tokens", "FILE"], "item 1 is True"),
        (" ".join(["-1"] * 16), ["--tokens", "FILE"], "item 0 is '-1'"),
        (" ".join(["99999999999"] * 16), ["--tokens", "FILE"], "no key can be made"),
        ("zz", ["--hashes", "FILE"], "item 0 is 'zz'"),
        ("1.5", ["--hashes", "FILE", "--hash-type", "int"], "item 0 is '1.5'"),
        ("1", [], "nothing to explain"),
        ("1", ["--tokens", "FILE", "--hashes", "FILE"], "several things"),
        ("1", ["--tokens", "no/such/file"], "cannot be read"),
        ("1", ["0" * 64, "--salt", "s"], "in a digest already"),
        ("1", ["0" * 64, "1" * 64], "at most one STORE and one KEY"),
    ],
)
def test_what_makes_no_prompt_is_refused_with_what_was_expected(
    store: str, tmp_path: Path, text: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    assert main(["explain", store, *given]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_no_absence(
    tmp_path: Path, server: S3FaultServer, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = Place(tmp_path, server.url).tier("s3", tmp_path.name, capacity="64MiB")
    config = tmp_path / "s3.toml"
    config.write_text("\n".join(["[l1]", "enabled = false", "[[l2]]", *(f'{k} = "{v}"' for k, v in tier.items())]))
    put(config)
    with server.faulty(Fault("error500", methods=("GET",), only=f"{KEY[15].hex()}")):
        report = explain(capsys, str(config), "--tokens", prompt, code=EXIT_UNAVAILABLE)
    assert "tier_down" in {block["cause"] for block in report["tiers"][0]["blocks"]}

"""``kvstore diff``: which field keeps two namespaces apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from kvstore.cli.diff import fields_that_differ
from kvstore.cli.main import main
from tests.faults.s3_faults import S3FaultServer
from tests.stateful.media import BUCKET, Place
from tests.support import blocks_of
from tests.unit.cli.tiers import BRANCH, DIGEST, KEY, NAMESPACE, SPEC, fill, run_json, write_config

OTHER = replace(NAMESPACE, revision="r2", engine="vllm", host="gpu-7")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A config; NAMESPACE holds two sequences, OTHER one of them."""
    config = write_config(tmp_path / "a.toml", Place(tmp_path).tier("lmdb", "a"))
    fill(config)
    put(config, OTHER)
    return config


def put(config: Path, namespace: Namespace, spec: BlockSpec = SPEC) -> None:
    with KVCache.open(config, spec=spec, namespace=namespace) as cache:
        assert cache.put(KEY, blocks_of(spec, len(KEY))) == len(KEY)
        cache.flush(20)


def test_the_field_that_differs_is_named_with_both_values(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("diff", DIGEST.hex()[:8], OTHER.digest(SPEC).hex()[:8], "--in", store)
    report = run_json(capsys, *arguments, code=EXIT_FINDINGS)
    assert report["fields"] == [
        {"field": "revision", "kind": "identity", "a": "r1", "b": "r2"},
        {"field": "engine", "kind": "descriptive", "a": None, "b": "vllm"},
        {"field": "host", "kind": "descriptive", "a": None, "b": "gpu-7"},
    ]
    assert report["blocks"] == {"both": len(KEY), "only_a": 19, "only_b": 0}
    assert main([*map(str, arguments)]) == EXIT_FINDINGS
    lines = capsys.readouterr().out.splitlines()
    assert "  revision  r1  r2" in lines
    assert lines.index("  revision  r1  r2") < lines.index("  engine  -  vllm")
    assert "blocks: 40 in both, 19 only in A, 0 only in B" in lines


def test_a_namespace_is_equal_to_itself(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = DIGEST.hex()
    report = run_json(capsys, "diff", digest, digest, "--in", store)
    assert (report["same_namespace"], report["fields"]) == (True, [])
    assert report["blocks"] == {"both": 59, "only_a": 0, "only_b": 0}
    assert main(["diff", digest, digest, "--in", str(store)]) == EXIT_OK
    assert "one namespace: they share blocks" in capsys.readouterr().out


def test_one_namespace_with_other_blocks_is_different(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = write_config(tmp_path / "b.toml", Place(tmp_path).tier("segments", "b", capacity="64MiB"))
    with KVCache.open(second, spec=SPEC, namespace=NAMESPACE) as cache:
        cache.put(BRANCH, blocks_of(SPEC, len(BRANCH)))
        cache.flush(20)
    arguments = ("diff", DIGEST.hex(), "some/model", "--in", store, "--in", second)
    report = run_json(capsys, *arguments, code=EXIT_FINDINGS)
    assert (report["same_namespace"], report["blocks"]) == (True, {"both": 43, "only_a": 16, "only_b": 0})


def test_stores_that_hold_one_namespace_are_named_alone(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = write_config(tmp_path / "half.toml", Place(tmp_path).tier("lmdb", "half"))
    smaller = replace(SPEC, layers=2)
    put(half, NAMESPACE, smaller)
    report = run_json(capsys, "diff", half, half)
    assert report["a"]["namespace"] == NAMESPACE.digest(smaller).hex()
    report = run_json(capsys, "diff", tmp_path / "lmdb-half", half)
    assert report["same_namespace"]
    assert main(["diff", str(store), str(half)]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert "holds 2 namespaces; name one, with --in" in message
    assert f"{DIGEST.hex()} some/model" in message


def test_descriptions_are_compared_without_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smaller = replace(SPEC, layers=2, layout="NCLD")
    (tmp_path / "a.json").write_text(NAMESPACE.to_json(SPEC))
    (tmp_path / "b.json").write_text(OTHER.to_json(smaller))
    report = run_json(capsys, "diff", tmp_path / "a.json", tmp_path / "b.json", code=EXIT_FINDINGS)
    assert [f["field"] for f in report["fields"]] == ["revision", "spec.layout", "spec.layers", "engine", "host"]
    assert report["blocks"] is None
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == EXIT_OK


def test_a_model_with_several_namespaces_is_named_by_its_digest(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "some/model", DIGEST.hex(), "--in", str(store)]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert "fits several namespaces" in message
    assert OTHER.digest(SPEC).hex() in message
    assert main(["diff", "no/model", DIGEST.hex(), "--in", str(store)]) == EXIT_USAGE
    assert "has no namespace 'no/model'" in capsys.readouterr().err


def test_a_bucket_tells_the_fields_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with S3FaultServer(BUCKET) as server:
        config = write_config(tmp_path / "s3.toml", Place(tmp_path, server.url).tier("s3", "d"))
        fill(config)
        put(config, OTHER)
        arguments = ("diff", DIGEST.hex(), OTHER.digest(SPEC).hex(), "--in", config)
        report = run_json(capsys, *arguments, code=EXIT_FINDINGS)
    assert [f["field"] for f in report["fields"]] == ["revision", "engine", "host"]
    assert report["blocks"] == {"both": len(KEY), "only_a": 19, "only_b": 0}


def test_without_descriptions_the_digests_are_compared(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "lmdb-a" / "namespaces").glob("*.json"):
        path.unlink()
    arguments = ["diff", DIGEST.hex(), OTHER.digest(SPEC).hex(), "--in", str(store)]
    assert main(arguments) == EXIT_FINDINGS
    assert "because no description was kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "is no description of a namespace"),
        (b"{not json", "is no description of a namespace"),
        (b'{"digest": ' + b"[" * 100_000, "is no description of a namespace"),
        (b"\xff\xfe", "not UTF-8"),
    ],
    ids=["empty", "no-json", "deep", "binary"],
)
def test_files_that_are_no_description_are_usage_errors(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert main(["diff", str(path), str(path)]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_what_is_not_there_is_said(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "1d06", "fd02"]) == EXIT_USAGE
    assert "named by its digest or model with --in STORE" in capsys.readouterr().err
    assert main(["diff", "1d06", "fd02", "--in", str(tmp_path)]) == EXIT_UNAVAILABLE
    assert main(["diff", "a", "b", *["--in", str(store)] * 3]) == EXIT_USAGE
    assert "--in is given 3 times" in capsys.readouterr().err


def test_fields_of_a_newer_release_are_compared_too() -> None:
    def document(**more: Any) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(NAMESPACE.to_json(SPEC))
        described["identity"] |= more
        return described

    (found,) = fields_that_differ(document(attention_sinks=4), document())
    assert (found.name, found.kind, found.a, found.b) == ("attention_sinks", "identity", 4, None)

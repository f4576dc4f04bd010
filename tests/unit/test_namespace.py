"""Namespaces: what separates blocks, what only describes them, and the readable copy."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.namespace import IDENTITY_FIELDS, Namespace
from kvstore.spec import BlockSpec

SPEC = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
names = st.text(min_size=1, max_size=8)
ranges = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda r: (r[0], r[0] + r[1]))
namespaces = st.builds(
    Namespace,
    model=names,
    revision=st.none() | names,
    text_config=st.none() | names,
    kv_scales=st.none() | names,
    layers=st.none() | ranges,
    kv_heads=st.none() | ranges,
    engine_layout=st.none() | names,
    lossy_codec=st.none() | st.integers(0, 9),
    engine=st.none() | names,
    rank=st.none() | st.integers(0, 9),
)


class Model(enum.StrEnum):
    A = "a"


BASE: dict[str, Any] = {"model": "m", "revision": "r1"}
IDENTITY_CHANGES: list[dict[str, Any]] = [
    {},
    {"model": "n"},
    {"model": "m/r1"},
    {"revision": "r2"},
    {"revision": None},
    {"text_config": "r1"},
    {"kv_scales": "r1"},
    {"engine_layout": "r1"},
    {"text_config": "x"},
    {"kv_scales": "x"},
    {"engine_layout": "x"},
    {"layers": (0, 30)},
    {"layers": (0, 15)},
    {"layers": (15, 30)},
    {"kv_heads": (0, 30)},
    {"kv_heads": (0, 15)},
    {"layers": (0, 30), "kv_heads": (0, 30)},
    {"lossy_codec": 0},
    {"lossy_codec": 1},
    {"key_scheme": 2},
    {"engine_version": "1", "include_engine_version": True},
    {"engine_version": "2", "include_engine_version": True},
    {"engine": "vllm", "engine_version": "1", "include_engine_version": True},
]
SPECS = [
    SPEC,
    BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="float16"),
    BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16", layout="NCLD"),
    BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16", layout="LCHND"),
    BlockSpec(layers=30, kv_heads=6, head_dim=32, block_tokens=16, dtype="bfloat16"),
    BlockSpec(layers=30, kv_heads=3, head_dim=32, block_tokens=32, dtype="bfloat16"),
    BlockSpec(layers=30, kv_heads=3, head_dim=128, block_tokens=16, dtype="bfloat16", kv=1),
    BlockSpec.opaque(SPEC.nbytes, block_tokens=16, tag="packed"),
]


def test_each_identity_field_and_each_spec_is_a_namespace_of_its_own() -> None:
    digests = [Namespace(**{**BASE, **change}).digest(spec) for change in IDENTITY_CHANGES for spec in SPECS]

    assert len(set(digests)) == len(digests)
    assert {len(d) for d in digests} == {16}
    assert {f for change in IDENTITY_CHANGES for f in change} >= set(IDENTITY_FIELDS)
    assert digests == [Namespace(**{**BASE, **change}).digest(spec) for change in IDENTITY_CHANGES for spec in SPECS]


@pytest.mark.parametrize(
    "change", [{"engine": "vllm"}, {"engine_version": "0.32"}, {"rank": 3}, {"world_size": 8}, {"host": "node-7"}]
)
def test_who_wrote_it_does_not_separate(change: dict[str, Any]) -> None:
    described = Namespace(**BASE, **change)

    assert described.digest(SPEC) == Namespace(**BASE).digest(SPEC)
    assert described != Namespace(**BASE)


@given(namespaces, namespaces)
def test_digests_are_equal_exactly_when_identity_fields_are(a: Namespace, b: Namespace) -> None:
    same = all(getattr(a, name) == getattr(b, name) for name in IDENTITY_FIELDS)

    assert (a.digest(SPEC) == b.digest(SPEC)) == same


@given(namespaces)
def test_readable_copy_reads_back(namespace: Namespace) -> None:
    text = namespace.to_json(SPEC)

    assert Namespace.from_json(text) == namespace
    assert Namespace.from_json(text.encode()) == namespace
    assert json.loads(text) == namespace.describe(SPEC)


@pytest.mark.parametrize("model", ["../../x", "a\0b", "🔑", "\udcff", "a" * 10_000, " ", "C:\\nul", "{}"])
def test_model_may_be_any_text(model: str) -> None:
    namespace = Namespace(model=model)

    assert len(namespace.digest(SPEC)) == 16
    assert namespace.digest(SPEC) != Namespace(model=model + "x").digest(SPEC)
    assert Namespace.from_json(namespace.to_json(SPEC)) == namespace
    namespace.to_json(SPEC).encode("ascii")


def test_description_has_every_field_once_and_the_spec() -> None:
    document = Namespace(**BASE, layers=(0, 15), rank=1).describe(SPEC)

    assert document["identity"]["layers"] == [0, 15]
    assert document["descriptive"]["rank"] == 1
    assert not document["identity"].keys() & document["descriptive"].keys()
    assert document["digest"] == Namespace(**BASE, layers=(0, 15)).digest(SPEC).hex()
    assert (document["spec"]["layout"], document["spec"]["fingerprint"]) == ("LCND", SPEC.fingerprint().hex())


def test_engine_version_is_described_or_identifies_on_request() -> None:
    only_described = Namespace(**BASE, engine="vllm", engine_version="0.32")
    identifies = Namespace(**BASE, engine="vllm", engine_version="0.32", include_engine_version=True)

    assert "engine_version" in only_described.describe(SPEC)["descriptive"]
    assert "engine_version" in identifies.describe(SPEC)["identity"]
    with pytest.raises(ValueError, match="engine_version is not; give engine_version"):
        Namespace(**BASE, include_engine_version=True)


def test_diff_names_the_fields_that_differ_identity_first() -> None:
    a = Namespace(model="m", revision="r1", host="a", layers=(0, 2))
    b = Namespace(model="m", revision="r2", host="b", rank=1)

    assert list(a.diff(b).items()) == [
        ("revision", ("r1", "r2")),
        ("layers", ((0, 2), None)),
        ("rank", (None, 1)),
        ("host", ("a", "b")),
    ]
    assert a.diff(a) == {}


def test_unknown_revision_is_visible() -> None:
    assert Namespace(model="m", revision="r").revision_known
    assert not Namespace(model="m").revision_known


def test_ranges_given_as_lists_are_equal_to_tuples() -> None:
    listed: Any = [0, 2]

    assert Namespace(model="m", layers=listed) == Namespace(model="m", layers=(0, 2))
    assert hash(Namespace(model="m", layers=listed)) == hash(Namespace(model="m", layers=(0, 2)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": ""}, ValueError, "Namespace.model is empty; expected text"),
        ({"model": None}, TypeError, "Namespace.model is None; expected text"),
        ({"model": Model.A}, TypeError, "Namespace.model is <Model.A: 'a'>"),
        ({"revision": ""}, ValueError, "Namespace.revision is empty; expected text, or None when not known"),
        ({"kv_scales": b"x"}, TypeError, "Namespace.kv_scales is b'x'; expected text"),
        ({"layers": (2, 2)}, ValueError, r"Namespace.layers\[1\] is 2; expected 3 to"),
        ({"layers": (-1, 2)}, ValueError, r"Namespace.layers\[0\] is -1"),
        ({"kv_heads": (0, 1, 2)}, TypeError, r"Namespace.kv_heads is \(0, 1, 2\); expected \(first, stop\)"),
        ({"kv_heads": 3}, TypeError, "Namespace.kv_heads is 3"),
        ({"kv_heads": ("0", 3)}, TypeError, r"Namespace.kv_heads\[0\] is '0'"),
        ({"lossy_codec": True}, TypeError, "Namespace.lossy_codec is True"),
        ({"key_scheme": 0}, ValueError, "Namespace.key_scheme is 0"),
        ({"rank": -1}, ValueError, "Namespace.rank is -1"),
        ({"world_size": 0}, ValueError, "Namespace.world_size is 0"),
        ({"include_engine_version": 1}, TypeError, "Namespace.include_engine_version is 1; expected True or False"),
    ],
)
def test_what_identifies_nothing_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Namespace(**{**BASE, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a namespace document"),
        ("{}", "not a namespace document"),
        ('{"identity": {}, "descriptive": 5}', "not a namespace document"),
        ('{"identity": {"model": "m", "colour": 1}, "descriptive": {}}', "has unknown fields colour; a newer kvstore"),
        ('{"identity": {}, "descriptive": {}}', "namespace document is not valid: .*model"),
        ('{"identity": {"model": 5}, "descriptive": {}}', "namespace document is not valid: Namespace.model is 5"),
        ("{", "Expecting"),
    ],
)
def test_other_documents_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(message)):
        Namespace.from_json(text)

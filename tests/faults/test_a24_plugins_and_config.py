"""A24: broken plugins and wrong configs are told at open, by name; a plugin that misbehaves later is a failing tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore import KVCache, KVStoreError
from kvstore.errors import ConfigError
from tests.faults.media import server_of
from tests.faults.process import run
from tests.faults.s3_faults import Fault
from tests.faults.store import Store, over
from tests.support_faults import NAMESPACE, SMALL, noise, unrelated
from tests.unit.plugins.fakes import GOOD, HOOKS, write_dist

BROKEN = {
    "no-driver": ("import boto99", ["boto99"]),
    "no-syntax": ("def (", ["SyntaxError"]),
    "exits": ("import sys; sys.exit(3)", ["SystemExit"]),
    "raises": ("1 / 0", ["ZeroDivisionError"]),
    "misspelt": (
        f"{HOOKS}\n@hookimpl\ndef kvstore_register_backend():\n    return []\n",
        ["kvstore_register_backend", "kvstore_register_backends"],
    ),
    "wrong-arity": (f"{HOOKS}\n@hookimpl\ndef kvstore_events(happenings):\n    pass\n", ["happenings"]),
    "old-contract": (
        GOOD.replace('"good"', '"old-contract"').replace("factory=factory", "factory=factory, api_version=99"),
        ["99"],
    ),
    "no-backend": (f"{HOOKS}\n@hookimpl\ndef kvstore_register_backends():\n    return [object()]\n", ["object"]),
}
"""Name of the entry point: source of its module, what the error must say besides distribution and entry point."""

SLEEPS = "import time; time.sleep(30)"
MISBEHAVING = """
import time
from dataclasses import dataclass
from kvstore.backend import Capability
from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin
from kvstore.types import option

@dataclass(frozen=True)
class Options:
    how: str = option("fine", doc="What goes wrong.")

METHODS = ("put_many", "get_many", "read_many", "exists_many", "delete_many", "discard", "epoch", "touch_many", "usage",
           "maintain", "drop")

class Misbehaving(MemoryBackend):
    # read by threads of the tier: what declares CALLER_READS promises plain memory, and is called by the caller
    capabilities = MemoryBackend.capabilities & ~Capability.CALLER_READS

    def open(self, context):
        super().open(context)
        answer = {"raises": self._raise, "none": lambda *a, **k: None, "text": lambda *a, **k: "text",
                  "short": lambda *a, **k: [], "number": lambda *a, **k: 7, "slow": self._slow}.get(context.options.how)
        if answer is not None:
            for name in METHODS:
                setattr(self, name, answer)
    def _raise(self, *args, **more):
        raise RuntimeError("a bug of the plugin")
    def _slow(self, *args, **more):
        time.sleep(10)

@hookimpl
def kvstore_register_backends():
    return [BackendPlugin(name="misbehaving", options=Options, factory=Misbehaving, summary="Does")]
"""

# Everything in one fresh process: it scans the fake distributions as those of an installation.
PROCESS = """
from kvstore.errors import KVStoreError
def told(section, **more):
    config = STORE.config(**more)
    config["l2"].insert(0, section)
    try:
        KVCache.open(config, spec=SMALL, namespace=NAMESPACE).close()
    except KVStoreError as e:
        return f"{type(e).__name__}: {e}"
    return ""
site = json.loads(os.environ["SITE"])
began = time.monotonic()
with STORE.open(l1="1MiB") as cache:  # none of the broken ones is selected
    opened_s = time.monotonic() - began
    cache.store(unrelated(0), noise(SMALL, [0]))
    assert same(cache.fetch(unrelated(0)), noise(SMALL, [0]))
imported = [name for name in site["modules"] if name in sys.modules]
broken = {name: told({"backend": name}) for name in site["broken"]}
twice = told({"backend": "twice"})
twin = told({"backend": "twin"})
unknown = told({"backend": "misbehavin"})
misbehaved = {}
for how in ("raises", "none", "text", "short", "number", "slow"):
    config = STORE.config(l1="1MiB", deadline=0.3)
    config["l2"].insert(0, {"backend": "misbehaving", "name": "bad", "how": how, "deadline": 0.3, "required": False})
    config["defaults"] = {"deadline": 1.0}
    began = time.monotonic()
    cache = WatchedCache(KVCache.open(config, spec=SMALL, namespace=NAMESPACE), 6.0)
    cache.put(chain(3), noise(SMALL, range(3)))
    flushed = True
    try:
        cache.flush(5)
    except TimeoutError:
        flushed = False
    seconds = []
    for key, n in ((chain(3), 3), (chain(3, seed=1), 0)):
        for _ in range(10):
            start = time.monotonic()
            out = target(SMALL, 3)
            assert cache.get(key, out) == n, how
            assert same(out[:n], noise(SMALL, range(3))[:n])
            cache.lookup(key)
            cache.contains_each(key)
            seconds.append(time.monotonic() - start)
    with cache.acquire(chain(3)) as lease:
        assert len(lease) == 3
    cache.delete(chain(3, seed=1))
    state = cache.health().state
    bad = [t for t in cache.stats().tiers if t.name == "bad"]
    noticed = bad[0].counters.io_errors + bad[0].counters.timeouts if bad else -1
    cache.cache.close()
    misbehaved[how] = dict(state=state, noticed=noticed, median=sorted(seconds)[10], most=max(seconds), flushed=flushed)
with STORE.open() as cache:  # what lies below was written all the same
    assert cache.get(chain(3), target(SMALL, 3)) == 3
print(json.dumps(dict(opened_s=opened_s, imported=imported, broken=broken, twice=twice, twin=twin, unknown=unknown,
                      misbehaved=misbehaved)))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    for number, (name, (source, _)) in enumerate(BROKEN.items()):
        write_dist(folder, f"dist-of-{name}", entry_points={name: f"kvx{number}"}, modules={f"kvx{number}": source})
    write_dist(folder, "dist-that-sleeps", entry_points={"sleeps": "kvsleeps"}, modules={"kvsleeps": SLEEPS})
    for which in ("one", "two"):
        module = {f"kvtwice{which}": GOOD.replace('"good"', '"twice"')}
        write_dist(folder, f"dist-{which}", entry_points={"twice": f"kvtwice{which}"}, modules=module)
    twin = GOOD.replace('"good"', '"twin"').replace(
        'raise AssertionError("registration must not make anything")',
        "from kvstore.memory_backend import MemoryBackend; return MemoryBackend()",
    )
    for kind in ("dist-info", "egg-info"):
        write_dist(folder, "dist-twin", entry_points={"twin": "kvtwin"}, modules={"kvtwin": twin}, kind=kind)
    write_dist(folder, "dist-bad", entry_points={"misbehaving": "kvbad"}, modules={"kvbad": MISBEHAVING})
    return folder


@over("L")
def test_plugins_that_are_broken_or_misbehave(store: Store, site: Path) -> None:
    modules = [path.stem for path in site.glob("*.py") if path.stem not in {"kvtwin", "kvbad"}]
    facts = json.dumps({"modules": modules, "broken": list(BROKEN)})
    report = run(PROCESS, store, env={"PYTHONPATH": str(site), "SITE": facts})
    assert report["opened_s"] < 10.0
    assert report["imported"] == []
    for name, (_, words) in BROKEN.items():
        said = report["broken"][name]
        assert [word for word in (f"dist-of-{name}", repr(name), *words) if word not in said] == [], said
    assert [word for word in ("dist-one", "dist-two", "'twice'") if word not in report["twice"]] == []
    assert report["twin"] == ""
    assert "misbehaving" in report["unknown"]
    for how, result in report["misbehaved"].items():
        judge_misbehaved(how, result)


def judge_misbehaved(how: str, result: dict[str, Any]) -> None:
    assert result["state"] == "degraded", (how, result)
    assert result["noticed"] > 0, (how, result)
    assert result["most"] < 4.0, (how, result)  # three calls with a deadline of one second each
    assert result["median"] < 0.5, (how, result)  # suspended by then
    assert result["flushed"] or how == "slow", (how, result)


# -- configs

SECRET = "very-secret-value"  # noqa: S105 - that it is never shown is what is tested
L1 = '[l1]\ncapacity = "1MiB"\n'
WRONG: list[tuple[str, str, list[str]]] = [
    ("unknown key", '[[l2]]\nbackend = "{kind}"\ncapcity = "1GiB"', ["capcity", "'capacity'"]),
    ("unknown option", '[[l2]]\nbackend = "{kind}"\npath = "{path}"\nmap_sice = "1GiB"', ["map_sice"]),
    ("unknown section", L1 + "[l3]\nx = 1", ["l3"]),
    ("wrong type", '[l1]\nenabled = "yes"', ["l1.enabled", "'yes'"]),
    ("number for text", '[[l2]]\nbackend = "{kind}"\npath = 7', ["path", "7"]),
    ("decimal unit misspelt", '[l1]\ncapacity = "10 GiBs"', ["l1.capacity", "10 GiBs"]),
    ("ambiguous unit", '[l1]\ncapacity = "4G"', ["l1.capacity", "4G"]),
    ("negative", "[l1]\ncapacity = -1", ["l1.capacity", "-1"]),
    ("zero", "[l1]\ncapacity = 0", ["l1.capacity", "0"]),
    ("not a number", "[defaults]\ndeadline = nan", ["defaults.deadline", "nan"]),
    ("infinite", "[defaults]\ndeadline = inf", ["defaults.deadline", "inf"]),
    (
        "two tiers of one name",
        '[[l2]]\nbackend = "memory"\nname = "a"\n[[l2]]\nbackend = "memory"\nname = "a"',
        ["name", "'a'"],
    ),
    ("no such backend", '[[l2]]\nbackend = "lmbd"', ["lmbd", "lmdb"]),
    ("no such codec", '[[l2]]\nbackend = "memory"\ncodec = "planets"', ["planets"]),
    ("nothing at all", "[l1]\nenabled = false", ["l1"]),
    ("no TOML", "l1 = {", []),
    (
        "a secret misspelt",
        f'[[l2]]\nbackend = "s3"\nbucket = "b"\naccess_key_id = "a"\nsecret_acces_key = "{SECRET}"',
        ["secret_acces_key"],
    ),
    (
        "a secret of the wrong type",
        f'[[l2]]\nbackend = "s3"\nbucket = "b"\naccess_key_id = "a"\nsecret_access_key = ["{SECRET}"]',
        ["secret_access_key"],
    ),
]


@pytest.mark.parametrize(("text", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
@over("LNT")
def test_a_wrong_config_is_told_by_file_option_and_value_and_makes_nothing(
    store: Store, text: str, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "the-config.toml"
    section = store.section()
    good = "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
    # a good tier before the wrong part: it must not be made either
    before = "" if "[[l2]]" not in text and "[l" in text else f"[[l2]]\nname = 'good'\n{good}"
    after = f"\n[[l2]]\nname = 'good'\n{good}" if not before and "l1]" in text and "enabled = false" not in text else ""
    filled = text.replace("{kind}", section["backend"]).replace("{path}", str(store.root))
    file.write_text(before + filled + after)
    try:
        KVCache.open(str(file), spec=SMALL, namespace=NAMESPACE).close()
    except KVStoreError as e:
        said = f"{type(e).__name__}: {e}"
    else:
        pytest.fail("the config was accepted")
    assert "the-config.toml" in said or "plugin" in said.lower() or "backend" in said, said
    assert [word for word in words if word not in said] == [], said
    assert SECRET not in said
    assert not store.root.exists()


def test_a_missing_and_an_empty_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"no-such\.toml"):
        KVCache.open(str(tmp_path / "no-such.toml"), spec=SMALL, namespace=NAMESPACE)
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    caplog.clear()
    try:
        KVCache.open(str(empty), spec=SMALL, namespace=NAMESPACE).close()
    except KVStoreError as e:
        said = str(e)
    else:
        said = caplog.text
    assert "l2" in said or "tier" in said, said  # that nothing will outlive the process is said


@over("S")
def test_secrets_are_in_no_error_stats_health_or_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.open(secret_access_key=SECRET, access_key_id="id") as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        with server_of(store).faulty(Fault("forbid")):
            for i in range(8):
                cache.fetch(unrelated(i))
        shown = [json.dumps(cache.stats().to_dict()), json.dumps(cache.health().to_dict()), repr(cache.cache)]
        shown += [repr(cache.config), str(cache.config.l2[0].options), caplog.text]
        shown += [json.dumps(cache._state.stack.tiers[0].tier.backend.describe())]
    assert [text for text in shown if SECRET in text] == []
    server_of(store).inject(Fault("forbid"))
    said = refused(store, secret_access_key=SECRET, access_key_id="id")
    assert said
    assert SECRET not in said


def refused(store: Store, **options: Any) -> str:
    """What is said at open, with what caused it; the exception itself would keep connections."""
    try:
        store.open(**options).close()
    except KVStoreError as e:
        return f"{e!r} {e} {e.__cause__!r}"
    return ""

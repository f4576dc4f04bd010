"""A22: whatever somebody plants in a store is a miss: no code runs, no memory is taken, nothing hangs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import KVCacheKey
from kvstore.backend import PutItem
from kvstore.keyring import Keyring
from kvstore.record import parse_head
from kvstore.types import Call, PutStatus
from tests.faults.hostile import GIB, forgeries, keyed, moved, sound
from tests.faults.process import Forge
from tests.faults.store import MIB, Store, over
from tests.support_faults import SMALL, WatchedCache, noise, same, unrelated

GOOD = 1000
"""Number of a key whose record is sound."""

HEAD_BYTES = 192 + 16
"""Head of a record of one segment; media that were told of another one refuse it unseen."""

# Reads every key of ARGS[0] with an audit hook; says what became of each, and what it took.
READ = """
watched = {"pickle.find_class", "marshal.load", "marshal.loads", "exec", "compile", "code.__new__", "os.system",
           "subprocess.Popen", "ctypes.dlopen"}
seen, armed = [], False
def hook(event, args):
    if armed and event in watched:
        seen.append(event)
sys.addaudithook(hook)
reports = []
with STORE.open(capacity="8GiB") as cache:  # what is planted shall not push the others out
    good = cache.fetch(unrelated(1000))  # whatever is imported late is imported now
    assert good is not None and not good.view(torch.uint8).any()
    before_bytes = peak = rss_bytes()
    for i in json.loads(ARGS[0]):
        seen, armed, began = [], True, time.monotonic()
        out = target(SMALL)
        status = cache.get_each(unrelated(i), out)[0].value
        again = cache.get(unrelated(i), out)
        armed = False
        peak = max(peak, rss_bytes())
        reports.append([i, status, again, untouched(out), seen, time.monotonic() - began])
    good = cache.fetch(unrelated(1000))
    assert good is not None and not good.view(torch.uint8).any()
    for i in json.loads(ARGS[0]):
        cache.store(unrelated(i), noise(SMALL, [i]))
        found = cache.fetch(unrelated(i))
        assert found is not None and same(found, noise(SMALL, [i])), f"the good copy of {i} could not be stored"
print(json.dumps(dict(reports=reports, grown=peak - before_bytes)))
"""


def plant(cache: WatchedCache, key: KVCacheKey, record: bytes, head_bytes: int = 0) -> None:
    """Store bytes under a block's name with the backend itself, as any program with its library can."""
    backend, tier = cache._state.stack.tiers[0].tier.backend, cache._state.stack.tiers[0].tier
    (name,) = tier.names(key.kind, key.digests)
    item = PutItem(name, [memoryview(record)], head_bytes=min(head_bytes, len(record)))
    assert backend.put_many([item], Call.within(5)) == [PutStatus.STORED]


def judge(report: dict[str, Any], names: dict[int, str]) -> None:
    assert report["grown"] < 64 * MIB
    for i, status, again, untouched, events, seconds in report["reports"]:
        assert status in {"corrupt", "mismatch", "absent"}, (names[i], status)
        assert again == 0, names[i]
        assert untouched, names[i]
        assert events == [], names[i]
        assert seconds < 1.0, names[i]
    assert len(report["reports"]) == len(names)


@over("LNTS")
def test_planted_records_are_misses_and_nothing_else(store: Store, forge: Forge, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    names = {}
    with store.open() as cache:
        plant(cache, unrelated(GOOD), sound(GOOD), HEAD_BYTES)
        for name, i, record in forgeries(trap):
            plant(cache, unrelated(i), record, HEAD_BYTES)
            names[i] = name
    assert len(names) > 40
    judge(forge.work("import torch\n" + READ, store, json.dumps(list(names))), names)
    assert not trap.exists()


@over("LNTS")
def test_a_consistent_record_is_believed_only_if_the_key_made_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What checksums cannot tell, tags can: who made a record, and for which block."""
    monkeypatch.setenv("OWN", "1" * 64)
    monkeypatch.setenv("FOREIGN", "2" * 64)
    own, foreign = (Keyring.read([f"env:{name}"], "keys") for name in ("OWN", "FOREIGN"))
    with_key = {"defaults": {"record_keys": ["env:OWN"]}}
    planted = {
        "made without the key": sound(0),
        "made with another key": keyed(1, foreign),
        "made with the key, for another block": keyed(9, own),
        "made with the key and moved to another block, checksums made right": moved(keyed(9, own), unrelated(3)[0]),
        "made without the key and moved to another block": moved(sound(9), unrelated(4)[0]),
        "tag taken away": keyed(5, own, tag=bytes(16)),
    }
    with store.open(sections=with_key) as cache:
        for i, record in enumerate(planted.values()):
            plant(cache, unrelated(i), record, parse_head(memoryview(record)).head_bytes)
        plant(cache, unrelated(GOOD), keyed(GOOD, own), 192 + 32)
        for i, name in enumerate(planted):
            assert cache.fetch(unrelated(i)) is None, name
        good = cache.fetch(unrelated(GOOD))
        assert good is not None
        assert not good.view(torch.uint8).any()
        counters = cache.stats().tiers[0].counters
        assert (counters.unauthenticated >= 5, counters.key_mismatch >= 1, counters.corrupt) == (True, True, 0)
        for i, name in enumerate(planted):
            cache.store(unrelated(i), noise(SMALL, [i]))
            found = cache.fetch(unrelated(i))
            assert found is not None, name
            assert same(found, noise(SMALL, [i]))
    with store.open() as cache:  # who has no key believes all that is consistent, and nothing keyed
        plant(cache, unrelated(100), sound(100))
        plant(cache, unrelated(104), moved(sound(9), unrelated(104)[0]))
        assert cache.fetch(unrelated(100)) is not None
        assert cache.fetch(unrelated(104)) is not None
        assert cache.fetch(unrelated(GOOD)) is None


def enormous(store: Store, value: bytes) -> dict[str, Any]:
    """How each medium can be made to claim a gigabyte: a function of the place."""

    def sparse(place: Any) -> None:
        os.truncate(store.root / place, GIB)

    def hole(place: Any) -> None:
        (store.root / place).write_bytes(b"")
        sparse(place)

    if store.kind == "tree":
        return {"sparse file of 1 GiB": sparse, "1 GiB of zeros": hole}
    return {
        f"claims {nbytes} bytes": lambda place, nbytes=nbytes: store.write(place, store.resized(value, nbytes))
        for nbytes in (GIB, (1 << 32) - 4096)
    }


@over("NT")
def test_a_value_that_claims_a_gigabyte_is_a_miss_and_takes_no_memory(store: Store, forge: Forge) -> None:
    names: dict[int, str] = {}
    with store.open() as cache:
        plant(cache, unrelated(GOOD), sound(GOOD))
        for i in range(2):
            cache.store(unrelated(i), noise(SMALL, [i]))
    for i, (name, damage) in enumerate(enormous(store, store.read(store.at(unrelated(0)))).items()):
        damage(store.at(unrelated(i)))
        names[i] = name
    judge(forge.work("import torch\n" + READ, store, json.dumps(list(names))), names)


@over("LNTS")
def test_nothing_is_ever_unpickled(store: Store, forge: Forge) -> None:
    report = forge.work(UNPICKLED, store)
    assert report == {"events": [], "hit": 3, "pickled": ["pickle.find_class"]}


UNPICKLED = """
import pickle
events = []
def hook(event, args):
    if event == "pickle.find_class" or (event == "import" and args[0] in {"pickle5", "dill", "cloudpickle"}):
        events.append(event)
with STORE.open(l1="1MiB", codec="planes") as cache:
    sys.addaudithook(hook)
    cache.put(chain(3), noise(SMALL, range(3)))
    cache.flush(60)
with STORE.open(l1="1MiB", codec="planes") as cache:
    hit = cache.get(chain(3), target(SMALL, 3))
    with cache.acquire(chain(3)):
        list(cache.stream(chain(3)))
    cache.stats().to_dict(), cache.health().to_dict(), cache.delete(chain(3)), cache.clear()
during = list(events)
pickle.loads(pickle.dumps(Path))  # the hook does see it
print(json.dumps(dict(events=during, hit=hit, pickled=events[:1])))
"""

"""Nothing that comes from a store, a config or a server is ever run, and nobody can connect to kvstore.

That no shipped source uses pickle, eval and their like is a rule of tests/layers; here is what a process really does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.media import MEDIA
from tests.faults.process import Forge
from tests.faults.store import Store
from tests.layers.test_sources import unsafe_loads

# Uses a cache in every way, twice, and reports what kvstore's own code ran, and where the process listens.
USED = """
import pickle, socket
RUNS_CODE = {"exec", "compile", "marshal.loads", "marshal.load", "code.__new__", "os.system", "os.exec",
             "os.posix_spawn", "subprocess.Popen", "ctypes.dlopen"}
OURS = tuple(f"{Path.cwd()}/{folder}/" for folder in ("kvstore", "backends", "plugins"))
seen, binds = [], []
def hook(event, args):
    if event == "pickle.find_class":
        seen.append([event, str(args)])
    elif event == "socket.bind":
        binds.append(str(args[1]))
    elif event in RUNS_CODE:
        frame = sys._getframe(1)  # modules that are imported late are run by importlib
        if frame.f_code.co_filename.startswith(OURS):
            seen.append([event, f"{frame.f_code.co_filename}:{frame.f_lineno}"])

def listening():
    # inodes of this process's sockets that accept connections, TCP in state 0A and unix with the flag of listen()
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in mine:
                found.append(words[1])
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "00010000" and words[6] in mine:
            found.append("unix")
    return found

sys.addaudithook(hook)
hits, listens = 0, []
for turn in range(2):
    with STORE.open(l1="1MiB", codec="planes") as cache:
        cache.put(chain(6), gauss(SMALL, range(6)))
        cache.flush(60)
        listens += listening()
        hits += cache.get(chain(6), target(SMALL, 6))
        hits += len(cache.get_each(chain(6), target(SMALL, 6)))
        with cache.acquire(chain(6)):
            list(cache.stream(chain(6)))
        cache.lookup(chain(6)), cache.contains_each(chain(6)), cache.stats().to_dict(), cache.health().to_dict()
        listens += listening()
listens += listening()
during = [list(seen), list(binds)]
pickle.loads(pickle.dumps(Path))  # the hook sees it, and would see code of kvstore's that runs something
OURS = (sys._getframe().f_code.co_filename,)
exec("pass")
with socket.create_server(("127.0.0.1", 0)) as server:
    proof = [{event for event, _ in seen} >= {"pickle.find_class", "exec"}, bool(binds), listening() != []]
print(json.dumps([hits, during, listens, proof]))
"""


@pytest.fixture(params=list(MEDIA))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = MEDIA[request.param].make(tmp_path / "store")
    yield made
    made.close()


def test_nothing_is_run_that_was_stored_and_nothing_listens(store: Store, forge: Forge) -> None:
    hits, (ran, bound), listens, proof = forge.work(USED, store)
    assert proof == [True, True, True]
    assert hits >= 24
    assert ran == []
    assert bound == []
    assert listens == []


@pytest.mark.parametrize("bad", [
    "import pickle",
    "import yaml",
    "from yaml import safe_load",
    "import shelve",
    "import marshal",
    "import dill",
    "def f(x): return eval(x)",
    "def f(x): exec(x)",
    "def f(x): return compile(x, 'x', 'exec')",
    "def f(torch, x): return torch.load(x, weights_only=True)",
    "def f(torch, x): torch.save(x, x)",
    "def f(torch, x): return torch.jit.load(x)",
    "def f(np, x): return np.load(x, allow_pickle=True)",
    "def f(numpy, x): return numpy.load(x, allow_pickle=flag)",
    "def f(x): return __import__(x)",
])  # fmt: skip
def test_the_rule_for_sources_knows_every_way(bad: str) -> None:
    assert unsafe_loads({"module": bad})


@pytest.mark.parametrize("good", [
    "import re\nPATTERN = re.compile('x')",
    "def f(model): return model.eval()",
    "def f(np, x): return np.load(x)",
    "import json, tomllib",
])  # fmt: skip
def test_the_rule_for_sources_leaves_others_alone(good: str) -> None:
    assert unsafe_loads({"module": good}) == []

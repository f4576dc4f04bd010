"""The backend as a config names it: through the cache, on every server, over a fork and a restart."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_s3.backend import S3Backend
from kvstore_s3.hooks import DEADLINE_S

from kvstore.backend import BackendContext, Capability, PutHint, PutItem
from kvstore.errors import ClosedError, ConfigError
from kvstore.plugins import Registry
from kvstore.types import Call, Presence, PutStatus, ReadStatus, Run
from tests.faults.s3_faults import S3FaultServer
from tests.support_s3 import CREDENTIALS
from tests.unit.s3.conftest import BUCKET, options

BLOCK_BYTES = 40_000


def item(i: int, names: list[bytes], data: bytes) -> PutItem:
    return PutItem(names[i], [b"H" * 208, data], PutHint(names[i - 1] if i else b"", i), 208)


def prompt(count: int) -> list[PutItem]:
    names = [b"namespace-epoch.t" + hashlib.sha256(b"%d" % i).digest() for i in range(count)]
    return [item(i, names, os.urandom(BLOCK_BYTES)) for i in range(count)]


def with_run(items: list[PutItem], seconds: float = 10.0) -> Call:
    call = Call.within(seconds)
    call.run = Run(0, [item.name for item in items])
    return call


def context(url: str, **changed: Any) -> BackendContext:
    return BackendContext("s3", options(url, **changed), block_bytes=BLOCK_BYTES)


def fetched(backend: S3Backend, items: list[PutItem]) -> list[bytes | None]:
    found: dict[int, bytes] = {}
    lock = threading.Lock()

    def receive(i: int, view: memoryview) -> None:
        with lock:
            found[i] = bytes(view)

    statuses = backend.get_many([item.name for item in items], receive, with_run(items))
    assert [status is ReadStatus.OK for status in statuses] == [i in found for i in range(len(items))]
    return [found.get(i) for i in range(len(items))]


def whole(items: list[PutItem]) -> list[bytes]:
    return [b"".join(item.buffers) for item in items]


@pytest.fixture
def backend(faulty: S3FaultServer) -> Iterator[S3Backend]:
    backend = S3Backend()
    backend.open(context(faulty.url))
    faulty.log.clear()
    yield backend
    backend.close()


def test_a_prompt_is_a_few_objects(backend: S3Backend, faulty: S3FaultServer) -> None:
    items = prompt(45)
    assert set(backend.put_many(items, with_run(items))) == {PutStatus.STORED}
    assert len(faulty.requests("PUT", "/kvstore/")) == 2 + 3  # 16, 16, then 8, 4 and 1
    assert fetched(backend, items) == whole(items)
    assert len(faulty.requests("GET")) == 5


def test_pack_1_stores_each_block_alone(faulty: S3FaultServer) -> None:
    backend = S3Backend()
    backend.open(context(faulty.url, pack=1))
    faulty.log.clear()
    items = prompt(5)
    backend.put_many(items, with_run(items))
    assert len(faulty.requests("PUT")) == 5
    assert fetched(backend, items) == whole(items)
    backend.close()


def test_keys_are_digests_below_the_prefix(backend: S3Backend, faulty: S3FaultServer) -> None:
    items = prompt(1)
    backend.put_many(items, with_run(items))
    digest = items[0].name[17:].hex()
    name_prefix = items[0].name[:16].hex()
    assert f"kvstore/{digest[:2]}/{name_prefix}/74{digest}" in faulty.buckets[BUCKET]


def test_two_processes_share_a_bucket(faulty: S3FaultServer, backend: S3Backend) -> None:
    items = prompt(20)
    backend.put_many(items, with_run(items))
    script = textwrap.dedent("""
        import sys
        from tests.unit.s3.test_backend import S3Backend, context, prompt, with_run
        from kvstore.types import Presence
        from kvstore.backend import PutItem
        names = [bytes.fromhex(line) for line in sys.stdin.read().split()]
        backend = S3Backend()
        backend.open(context(sys.argv[1]))
        items = [PutItem(name, []) for name in names]
        found = backend.exists_many(names, with_run(items))
        backend.close()
        sys.exit(sum(presence is Presence.PRESENT for presence in found))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, faulty.url],
        input="\n".join(item.name.hex() for item in items),
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.returncode == 20


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python warns of what is tested here
def test_a_child_opens_its_own_and_leaves_its_parents_connections_alone(
    backend: S3Backend, faulty: S3FaultServer
) -> None:
    items = prompt(16)
    backend.put_many(items, with_run(items))
    assert fetched(backend, items) == whole(items)
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        status = 1
        try:
            with pytest.raises(ClosedError):
                backend.epoch(b"n" * 16)
            own = S3Backend()
            own.open(context(faulty.url))
            status = 0 if fetched(own, items) == whole(items) else 2
            own.close()
        finally:
            os._exit(status)
    for _ in range(5):
        assert fetched(backend, items) == whole(items)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = {entry.connection for entry in faulty.log}
    assert fetched(backend, items) == whole(items)
    assert {entry.connection for entry in faulty.log} == before  # the parent's connections still work


def test_many_openings_leave_no_thread_and_no_descriptor(faulty: S3FaultServer) -> None:
    items = prompt(4)

    def cycle() -> None:
        backend = S3Backend()
        backend.open(context(faulty.url))
        backend.put_many(items, with_run(items))
        assert fetched(backend, items) == whole(items)
        backend.close()

    for _ in range(2):
        cycle()
    fds, threads = Path("/proc/self/fd"), threading.active_count()
    before = len(list(fds.iterdir()))
    for _ in range(5):
        cycle()
    assert len(list(fds.iterdir())) <= before + 4  # the server, in this process, closes its ends a little later
    assert threading.active_count() <= threads + 4


def test_facts_are_told_without_secrets(backend: S3Backend) -> None:
    facts = backend.describe()
    assert facts["data path"] == "fast"
    assert (facts["bucket"], facts["region"]) == (BUCKET, "us-east-1")
    assert facts["endpoint"].startswith("http://127.0.0.1:")
    assert facts["prefix"]
    assert facts["put once"] == "yes"
    assert not any(secret in value for secret in CREDENTIALS.values() for value in facts.values())
    assert "kvstore-test" not in repr(options(None))


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(ConfigError, match="S3Options"):
        S3Backend().open(BackendContext("s3", object()))


def test_the_plugin_says_what_it_is() -> None:
    plugin = Registry.discover().backend("s3")
    assert (plugin.default_codec, plugin.default_admit) == ("planes-base", "hot")
    assert plugin.default_deadline_s == DEADLINE_S == 2.0
    assert plugin.max_writers == 4
    c = Capability
    assert S3Backend.capabilities == (
        c.PERSISTENT | c.SHARED | c.READ_INTO | c.SCAN | c.CONDITIONAL_PUT | c.EVICTS | c.PARALLEL | c.RANGES | c.PACKS
    )


def test_presence_of_a_long_prompt_takes_a_handful_of_requests(backend: S3Backend, faulty: S3FaultServer) -> None:
    items = prompt(300)
    backend.put_many(items[:233], with_run(items))
    other = S3Backend()
    other.open(context(faulty.url))
    faulty.log.clear()
    call = with_run(items)
    call.leading_only = True
    found = other.exists_many([item.name for item in items], call)
    assert found == [Presence.PRESENT] * 233 + [Presence.ABSENT] * 67
    assert len(faulty.requests("HEAD")) <= 3 * 16
    other.close()

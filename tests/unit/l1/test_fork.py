from __future__ import annotations

import subprocess
import sys
import textwrap

# Python 3.12 and later warn about any fork while torch has threads.
STRICT = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")

SCRIPT = """
    import os, threading
    from kvstore.errors import ClosedError
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.lease import Lease
    from kvstore.l1.policies.lru import LruPolicy
    from kvstore.l1.reservation import Reservation
    from kvstore.spec import BlockSpec

    spec = BlockSpec(layers=1, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")
    l1 = L1Cache(spec, 8 * 8192, lambda _: LruPolicy())
    key = [bytes([i]) * 32 for i in range(4)]
    entries = l1.publish([(d, None) for d in key], l1.reserve(4), pins=1)
    lease = Lease(l1, entries)
    tensors = lease.tensors
    reservation = Reservation(l1, [(b"r" * 32, None)], l1.reserve(1))

    def closed(call):
        try:
            call()
        except ClosedError as e:
            assert "fork" in str(e), e
            return True
        return False

    l1._lock.acquire()  # another thread of the parent is inside L1 while the process forks
    child = os.fork()
    if child == 0:
        ok = all([
            closed(lambda: lease.tensors),
            closed(lambda: reservation.tensors),
            closed(reservation.commit),
            closed(lambda: l1.leading(key)),
            closed(lambda: l1.reserve(1)),
            closed(lambda: l1.counters),
        ])
        lease.release()
        reservation.release()
        l1.unpin(entries)
        l1.release_slots([7])
        l1.close()
        del tensors, lease, reservation
        own = L1Cache(spec, 8 * 8192, lambda _: LruPolicy())
        ok = ok and own.leading(key) == 0 and len(own.reserve(8)) == 8
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    l1._lock.release()
    assert os.waitstatus_to_exitcode(status) == 0, status
    assert l1.counters.pinned_blocks == 4
    assert lease.blocks == len(lease.tensors) == 4
    lease.release()
    assert l1.counters.pinned_blocks == 0 and l1.leading(key) == 4
    assert reservation.commit() == 1
    print("ok")
"""


def test_a_fork_voids_leases_in_the_child_and_changes_nothing_in_the_parent() -> None:
    done = subprocess.run(
        [sys.executable, *STRICT, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ok", "")


def test_an_interpreter_ends_quietly_with_leases_alive() -> None:
    script = SCRIPT[: SCRIPT.index("    def closed")] + '    print("ok")\n'
    done = subprocess.run(
        [sys.executable, *STRICT, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ok", "")

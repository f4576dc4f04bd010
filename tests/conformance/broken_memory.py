"""Backends in memory that are wrong in one way each."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence

from kvstore.backend import BackendContext, Capability, PutItem, Receive, RecordInfo, Usage
from kvstore.memory_backend import MemoryBackend
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from tests.conformance.catches import fails


@fails("the_callers_buffers_may_change_after_the_put")
class Aliasing(MemoryBackend):
    """Keeps the caller's buffers instead of their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._borrowed: dict[bytes, Sequence[memoryview | bytes]] = {}

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        statuses = super().put_many(items, call)
        stored = zip(items, statuses, strict=True)
        self._borrowed.update({item.name: item.buffers for item, status in stored if status is PutStatus.STORED})
        return statuses

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        def borrowed(i: int, view: memoryview) -> None:
            buffers = self._borrowed.get(names[i])
            receive(i, view if buffers is None else memoryview(b"".join(buffers)))

        return super().get_many(names, borrowed, call)


@fails("answers_have_the_order_of_the_names")
class Reordering(MemoryBackend):
    """Sorts the statuses of a read."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        return sorted(super().get_many(names, receive, call), key=lambda status: status.value)


@fails("caller_reads_arrive_in_order_in_the_calling_thread")
class Backwards(MemoryBackend):
    """Declares CALLER_READS, but delivers the last record first."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        if call.leading_only or call.stop():
            return super().get_many(names, receive, call)
        last = len(names) - 1
        return super().get_many(names[::-1], lambda i, view: receive(last - i, view), call)[::-1]


@fails("a_large_batch_is_answered_completely")
class Dropping(MemoryBackend):
    """Forgets the rest of a batch of more than 50 records, and says STORED."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return super().put_many(items[:50], call) + [PutStatus.STORED] * len(items[50:])


@fails("readers_never_see_a_mixture_of_two_records")
class Torn(MemoryBackend):
    """Writes a record of more than 8 KiB in two steps, and readers may come in between."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        for item in items:
            if 8192 < item.nbytes < 40_000 and super().exists_many([item.name], call) == [Presence.ABSENT]:
                half = b"".join(item.buffers)[: item.nbytes // 2]
                super().put_many([PutItem(item.name, [half])], call)
                time.sleep(0.004)
                super().delete_many([item.name], call)
        return super().put_many(items, call)


@fails("other_bytes_under_a_name_are_all_old_or_all_new")
class Mixing(MemoryBackend):
    """Overwrites the beginning of a record in place."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        for item in items:
            with self._lock:
                old, at = self._records.get(item.name, (b"", 0.0))
                new = b"".join(item.buffers)
                if old and len(new) < len(old) and new:
                    self._records[item.name] = (new + old[len(new) :], at)
        return super().put_many(items, call)


@fails("scan_lists_what_is_stored")
class LyingAboutScan(MemoryBackend):
    """Lists records although SCAN is not declared."""

    capabilities = MemoryBackend.capabilities & ~Capability.SCAN


@fails("records_survive_a_reopen_where_that_is_declared")
class LyingAboutPersistence(MemoryBackend):
    """Declares PERSISTENT and keeps nothing."""

    capabilities = MemoryBackend.capabilities | Capability.PERSISTENT


@fails("read_into_is_declared_by_backends_that_do_it")
class LyingAboutReadInto(MemoryBackend):
    """Declares READ_INTO, but copies as everybody does."""

    capabilities = MemoryBackend.capabilities | Capability.READ_INTO


@fails("ranges_is_declared_by_backends_that_do_it")
class LyingAboutRanges(MemoryBackend):
    """Declares RANGES, but reads whole records."""

    capabilities = MemoryBackend.capabilities | Capability.RANGES


@fails("no_capability_is_declared_that_is_only_reserved")
class AheadOfItsTime(MemoryBackend):
    """Declares that it takes device memory, which nobody hands out."""

    capabilities = MemoryBackend.capabilities | Capability.DEVICE_DIRECT


@fails("without_parallel_no_two_records_arrive_at_once")
class SecretlyParallel(MemoryBackend):
    """Delivers two records at once and does not declare PARALLEL."""

    capabilities = MemoryBackend.capabilities & ~Capability.CALLER_READS

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        kept: list[memoryview] = []

        def two_by_two(i: int, view: memoryview) -> None:
            if len(names) != 24 or i not in (3, 4):
                receive(i, view)
            elif i == 3:
                kept.append(view)
            else:
                other = threading.Thread(target=receive, args=(3, kept.pop()))
                other.start()
                receive(i, view)
                other.join()

        return super().get_many(names, two_by_two, call)


@fails("a_deleted_record_is_gone")
class StaleExists(MemoryBackend):
    """Remembers what exists and forgets to forget."""

    def __init__(self) -> None:
        super().__init__()
        self._remembered: set[bytes] = set()

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        found = super().exists_many(names, call)
        return [Presence.PRESENT if n in self._remembered else f for n, f in zip(names, found, strict=True)]

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        statuses = super().put_many(items, call)
        self._remembered.update(item.name for item, s in zip(items, statuses, strict=True) if s is PutStatus.STORED)
        return statuses


@fails("put_answers_have_the_order_of_the_items")
class ShortAnswers(MemoryBackend):
    """Leaves out the status of what was stored already."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return [status for status in super().put_many(items, call) if status is not PutStatus.EXISTS]


@fails("a_deleted_record_is_gone")
class DeleteNotVisible(MemoryBackend):
    """Counts deletes and leaves the records readable."""

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        return sum(p is Presence.PRESENT for p in self.exists_many(list(dict.fromkeys(names)), call))


@fails("absent_and_repeated_names_do_not_count_as_deleted")
class OvercountingDelete(MemoryBackend):
    """Counts every name as deleted."""

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        super().delete_many(names, call)
        return len(names)


@fails("an_epoch_has_8_bytes_and_stays")
class RestlessEpoch(MemoryBackend):
    """Makes a new epoch whenever it is asked."""

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        return super().epoch(namespace, bump=True)


@fails("a_bump_makes_a_new_epoch_for_one_namespace")
class OneEpochForAll(MemoryBackend):
    """Keeps one epoch for all namespaces."""

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        return super().epoch(b"all", bump=bump)


@fails("scan_lists_what_is_stored")
class IncompleteScan(MemoryBackend):
    """Lists the first page only."""

    def scan(self) -> Iterator[RecordInfo]:
        return iter(list(super().scan())[:50])


@fails("three_times_the_capacity_leaves_the_newest")
class OverCapacity(MemoryBackend):
    """Declares EVICTS, counts half of what it holds, and so holds twice the capacity."""

    def open(self, context: BackendContext) -> None:
        capacity = context.capacity_bytes
        self._told = capacity or 0
        double = BackendContext(context.tier, context.options, capacity and 2 * capacity, removed=context.removed)
        super().open(double)

    def usage(self) -> Usage:
        usage = super().usage()
        return Usage(usage.records, usage.payload_bytes, capacity_bytes=self._told, evicted=usage.evicted)


@fails("three_times_the_capacity_leaves_the_newest")
class SilentEviction(MemoryBackend):
    """Evicts and tells nobody."""

    def open(self, context: BackendContext) -> None:
        super().open(BackendContext(context.tier, context.options, context.capacity_bytes, read_only=context.read_only))


@fails("used_records_outlive_unused_ones")
class EvictsTheUsed(MemoryBackend):
    """Takes a use for a reason to go first."""

    def touch_many(self, names: Sequence[bytes]) -> None:
        with self._lock:
            for name in names:
                if name in self._records:
                    self._records.move_to_end(name, last=False)


@fails("eviction_takes_tails_before_heads")
class EvictsHeads(MemoryBackend):
    """Understands the order of touches the wrong way round."""

    def touch_many(self, names: Sequence[bytes]) -> None:
        super().touch_many(names[::-1])


@fails("close_leaves_no_thread_and_no_file_open")
class LeakingThreads(MemoryBackend):
    """Starts a thread at open that nobody ends."""

    def open(self, context: BackendContext) -> None:
        super().open(context)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


@fails("close_leaves_no_thread_and_no_file_open")
class LeakingFiles(MemoryBackend):
    """Opens a file and leaves it open."""

    def open(self, context: BackendContext) -> None:
        super().open(context)
        os.dup(0)


@fails("discard_leaves_a_record_that_was_repaired")
class DiscardsBlindly(MemoryBackend):
    """Drops the record whatever its checksum is."""

    def discard(self, name: bytes, header_checksum: int) -> None:
        self.delete_many([name], Call.within(5))


@fails("discard_drops_the_record_with_that_checksum")
class ComparesTheWrongWay(MemoryBackend):
    """Reads the checksum big-endian."""

    def discard(self, name: bytes, header_checksum: int) -> None:
        super().discard(name, int.from_bytes(header_checksum.to_bytes(8, "little"), "big"))


@fails("ranges_are_cut_at_the_records_end")
class InclusiveRanges(MemoryBackend):
    """Takes the stop of a range for its last byte."""

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        return super().get_ranges(names, [(start, stop + 1) for start, stop in ranges], receive, call)


@fails("what_receive_raises_comes_through_and_the_backend_lives")
class SwallowsExceptions(MemoryBackend):
    """Hides what the caller's callback raised."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        def careful(i: int, view: memoryview) -> None:
            with contextlib.suppress(Exception):
                receive(i, view)

        return super().get_many(names, careful, call)


@fails("a_call_that_is_over_reads_nothing")
class IgnoresDeadlines(MemoryBackend):
    """Reads on when nobody waits any more."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        return super().get_many(names, receive, Call.within(30, leading_only=call.leading_only))


@fails("use_after_close_raises_closed_error")
class LivesAfterClose(MemoryBackend):
    """Goes on after close."""

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._payload_bytes = 0


@fails("read_only_reads_and_refuses_every_change")
class WritesWhenReadOnly(MemoryBackend):
    """Does not look at read_only."""

    def open(self, context: BackendContext) -> None:
        super().open(BackendContext(context.tier, context.options, context.capacity_bytes, removed=context.removed))


@fails("names_have_1_to_255_bytes")
class ShortNames(MemoryBackend):
    """Looks at the first 100 bytes of a name, as a file name would allow."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return super().put_many([PutItem(i.name[:100], i.buffers, i.hint, i.head_bytes) for i in items], call)

"""Kinds O1 to O5: counters that flatter, drift while idle, count twice, clash between caches, or hang together with nothing."""

from __future__ import annotations

import time
from pathlib import Path

from kvstore import KVCache, Namespace
from tests.faults.store import Store, over
from tests.support_faults import NAMESPACE, SMALL, chain, noise, same, target, unrelated

STORED, ASKED = 70, 100


@over("LNTS")
def test_hit_rates_are_of_what_was_asked_for(store: Store) -> None:
    """70 of 100 blocks are there: 0.70 exactly, for the cache and for the tier, and the bytes are those of 70 blocks."""
    with store.open() as cache:
        for i in range(STORED):
            cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        delivered = sum(cache.get(unrelated(i), target(SMALL)) for i in range(ASKED))
        stats = cache.stats()
        for counters in (stats.cache, stats.tiers[0].counters):
            assert (counters.lookups, counters.hits, counters.misses) == (ASKED, STORED, ASKED - STORED)
            assert counters.bytes_out == STORED * SMALL.nbytes == delivered * SMALL.nbytes


@over("LNTS")
def test_one_get_is_one_hit_in_one_tier(store: Store) -> None:
    """Looking first, promoting and asking again add nothing to the hits of a read."""
    with store.open(l1="8MiB") as cache:
        cache.store(chain(6), noise(SMALL, range(6)))
        for hits in (6, 12, 18):
            cache.lookup(chain(6))
            cache.contains_each(chain(6))
            assert cache.get(chain(6), target(SMALL, 6)) == 6
            stats = cache.stats()
            assert stats.cache.hits == hits
            assert stats.cache.l1_hits + stats.tiers[0].counters.hits == hits
            assert stats.cache.bytes_out == hits * SMALL.nbytes


@over("LNTS")
def test_an_idle_cache_counts_nothing(store: Store) -> None:
    with store.open(l1="8MiB") as cache:
        cache.store(chain(6), noise(SMALL, range(6)))
        cache.get(chain(8), target(SMALL, 8))
        time.sleep(0.2)  # what the calls left to do in the background is done
        before = cache.stats()
        time.sleep(1.0)
        after = cache.stats()  # reading the counters is no use either
        assert after.cache == before.cache
        assert [tier.counters for tier in after.tiers] == [tier.counters for tier in before.tiers]
        assert after.l1 == before.l1


def test_caches_of_one_process_count_for_themselves(tmp_path: Path) -> None:
    """Two caches over stores of one name: no registry of the process mixes them up, or refuses the second."""
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": "memory", "name": "same"}]}
    other = Namespace(model="another", revision="r1")
    with (
        KVCache.open(config, spec=SMALL, namespace=NAMESPACE) as one,
        KVCache.open(config, spec=SMALL, namespace=other) as two,
    ):
        one.put(chain(3), noise(SMALL, range(3)))
        one.flush(10)
        out = target(SMALL, 3)
        assert one.get(chain(3), out) == 3
        assert same(out, noise(SMALL, range(3)))
        assert two.get(chain(3), target(SMALL, 3)) == 0
        assert (one.stats().cache.hits, one.stats().cache.misses) == (3, 0)
        assert (two.stats().cache.hits, two.stats().cache.misses) == (0, 3)
        assert (one.stats().tiers[0].counters.stored, two.stats().tiers[0].counters.stored) == (3, 0)

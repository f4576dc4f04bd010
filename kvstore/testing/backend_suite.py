"""The suite that proves a storage backend right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.backend import Backend
from kvstore.testing.deviations import Suite
from kvstore.testing.laws.batches import BatchLaws
from kvstore.testing.laws.caching import CachingLaws
from kvstore.testing.laws.deletes import DeleteLaws
from kvstore.testing.laws.lifecycle import LifecycleLaws
from kvstore.testing.laws.limits import LimitLaws
from kvstore.testing.laws.packs import PackLaws
from kvstore.testing.laws.processes import ProcessLaws
from kvstore.testing.laws.reads import ReadLaws
from kvstore.testing.laws.records import RecordLaws
from kvstore.testing.laws.settings import SettingsLaws
from kvstore.testing.laws.space import SpaceLaws
from kvstore.testing.laws.threads import ThreadLaws
from kvstore.testing.machine import machine_of
from kvstore.testing.raw import MakeRaw, RawThroughBackend
from kvstore.testing.store import Store, Target


class BackendConformance(
    RecordLaws,
    BatchLaws,
    ReadLaws,
    LimitLaws,
    DeleteLaws,
    SpaceLaws,
    PackLaws,
    LifecycleLaws,
    ProcessLaws,
    ThreadLaws,
    CachingLaws,
    SettingsLaws,
    Suite,
):
    """Every law of :class:`kvstore.backend.Backend`, for the backend plugin named ``plugin``.

    A subclass names the plugin and overrides the fixture ``options``.  Every declared capability is proven,
    and so is the absence of every other one.  Redefining a test raises ``TypeError`` unless it is marked
    with :func:`~kvstore.testing.deviates`.

    Attributes:
        plugin: Plugin name, as in ``backend = "..."``.
        hooks: Hooks module to register when no installed distribution provides the plugin.
        capacity_bytes: Budget for laws that evict nothing; room for a record of 16 MiB.
        examples: Random sequences that are compared with a dict.
    """

    plugin: ClassVar[str]
    hooks: ClassVar[str] = ""
    capacity_bytes: ClassVar[int] = 256 << 20
    examples: ClassVar[int] = 12

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """The plugin's config keys for a place that is empty; override it.

        Values as a TOML file would hold them (paths as text), because other processes are told them.
        """
        return {}

    @pytest.fixture
    def raw(self) -> MakeRaw:
        """Access to stored bytes behind the backend's back; override it where the medium allows."""
        return RawThroughBackend

    @pytest.fixture
    def store(self, options: Mapping[str, Any]) -> Iterator[Store]:
        """The place under test; opens backends and closes them after the test."""
        target = Target(self.plugin, dict(options), self.hooks, self.capacity_bytes)
        store = Store(target, target.registry())
        yield store
        store.close()

    @pytest.fixture
    def backend(self, store: Store) -> Backend:
        """An opened backend."""
        return store.open()

    def test_random_sequences_of_calls_agree_with_a_dict(self, store: Store) -> None:
        run_state_machine_as_test(
            machine_of(store),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

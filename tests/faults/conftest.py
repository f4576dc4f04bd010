"""Fixtures of the fault scenarios: the medium, what must not be left behind, and how long to go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.faults.media import MEDIA
from tests.faults.process import Forge, Shim
from tests.faults.store import Store
from tests.support_faults import Residue, build_shim, left_behind


class Rounds(Protocol):
    def __call__(self, quick: int, long: int) -> int: ...


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Rounds:
    """How often to repeat: ``rounds(quick, long)``, the second with ``--soak``."""
    soak = bool(request.config.getoption("--soak"))
    return lambda quick, long: long if soak else quick


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """G6: what the test opened is given back: threads, files, sockets."""
    before = Residue.now()
    yield
    left = left_behind(before)
    assert not left, f"left behind after close: {left}"


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, nothing_left_behind: None) -> Iterator[Store]:
    """The medium that the test's ``over(...)`` names, empty."""
    made = MEDIA[request.param].make(tmp_path / request.param)
    yield made
    made.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library that makes file operations fail; None where it cannot be built."""
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def forge(library: Path | None) -> Iterator[Forge]:
    """Makes worker processes."""
    made = Forge(library)
    yield made
    made.close()


@pytest.fixture
def shim(library: Path | None, store: Store, tmp_path: Path) -> Shim:
    """Files of the store fail in a worker that gets this."""
    if library is None:
        pytest.skip("needs gcc to build the shim that makes file operations fail")
    return Shim(store.root, tmp_path / "control")

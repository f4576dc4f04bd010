"""Kind S10: a temporary name that somebody knew beforehand, planted as a link."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvstore_nvme import tree_medium
from kvstore_nvme.tree_temporaries import new_name

from tests.faults.store import Store, over
from tests.support_faults import SMALL, noise, same, unrelated

OUTSIDE = b"what the file outside holds"


@over("T")
def test_a_planted_temporary_is_neither_written_through_nor_published(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are random; even one that is guessed is created anew or not at all."""
    outside = tmp_path / "outside"
    outside.write_bytes(OUTSIDE)
    guessed = new_name()
    assert guessed != new_name()
    with store.open(**store.alone()) as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        folder = (store.root / str(store.at(unrelated(0)))).parent
        cache.delete(unrelated(0))
        assert folder.is_dir() or not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / guessed).symlink_to(outside)
        with monkeypatch.context() as patch:
            patch.setattr(tree_medium, "new_name", lambda: guessed)
            cache.store(unrelated(0), noise(SMALL, [1]))
        assert outside.read_bytes() == OUTSIDE
        assert cache.fetch(unrelated(0)) is None
        cache.store(unrelated(0), noise(SMALL, [2]))
        found = cache.fetch(unrelated(0))
        assert found is not None
        assert same(found, noise(SMALL, [2]))
        assert outside.read_bytes() == OUTSIDE

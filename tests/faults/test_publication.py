"""A run whose checkpoints cannot be written for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import CommitUnknown, StoreUnavailable
from storage.filesystem import Bytes
from storage.history import read_all
from storage.local import LocalStore
from storage.schema import CheckpointPublished
from tasks import publish
from tests.faults.house import RUN, House


class FlakyStore(LocalStore):
    """Loses its reply for the first shard, and refuses the first manifest."""

    refused = lost = False

    def create(self, key: str, data: Bytes) -> None:
        if "/checkpoints/" in key and not self.refused:
            self.refused = True
            raise StoreUnavailable("no answer", expected="an answer", action="retry")
        super().create(key, data)
        if "/objects/" in key and not self.lost:
            self.lost = True
            raise CommitUnknown("no reply", expected="a reply", action="read back")


async def test_what_fails_for_a_while_is_published_from_the_same_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PAUSE_S", 0.0)
    store = FlakyStore(tmp_path)
    house = House(tmp_path)
    house.store = house.cluster._store = store
    await house.run()
    assert house.check().incarnations == 1
    assert (house.attempts, store.refused, store.lost) == (1, True, True)
    rows = [row for segment in read_all(store, RUN) for row in segment.rows]
    published = [row.record.step for row in rows if isinstance(row.record, CheckpointPublished)]
    assert published[0] == house.spec.steps.checkpoint_every

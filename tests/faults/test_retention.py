"""Whole runs that keep little: storage holds what retention says, kills change nothing, and `gc` finds what was planted
and nothing else."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.seaweed import S3Server
from gpu.generation import worker
from storage import payload
from storage.checkpoint import read_manifest
from storage.clock import SystemClock
from storage.filesystem import Store
from storage.garbage import delete_garbage, find_garbage
from storage.history import read_all
from storage.journal import fold, rows_of
from storage.ledger import Ledger
from storage.local import LocalStore
from storage.opening import open_store
from storage.retention import objects_of
from storage.runs import RunPaths
from storage.schema import CheckpointPublished
from tests.faults.house import RUN, House, small, until

PATHS = RunPaths(RUN)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield LocalStore(tmp_path)
    else:
        server: S3Server = request.getfixturevalue("seaweed")
        yield open_store(server.url(f"retention/{uuid.uuid4().hex[:8]}"))


@pytest.fixture(autouse=True)
def _in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token rows of every report lie in a file."""
    monkeypatch.setattr(payload, "INLINE_BYTES", 0)
    monkeypatch.setattr(worker, "INLINE_BYTES", 0)


def names(store: Store, folder: str) -> set[str]:
    return {key.rpartition("/")[2] for key in store.list(folder)}


def check_orphans(store: Store, ledger: Ledger) -> None:
    """Beside the ledger's checkpoints there may only be what a killed trainer uploaded and nobody recorded."""
    known = {one.manifest for one in (*ledger.kept, *ledger.checkpoints)}
    rows = rows_of(read_all(store, RUN))
    recorded = {row.record.manifest for row in rows if isinstance(row.record, CheckpointPublished)}
    assert known <= names(store, PATHS.checkpoints)
    assert (names(store, PATHS.checkpoints) - known).isdisjoint(recorded), "what was retired is gone"


def check_holds(store: Store, ledger: Ledger) -> None:
    """Exactly the checkpoints that the ledger has, and what they consist of."""
    stay = [*ledger.kept, *ledger.checkpoints]
    assert names(store, PATHS.checkpoints) == {one.manifest for one in stay}
    assert names(store, PATHS.objects) == objects_of(store, RUN, stay)


async def test_a_run_that_publishes_much_keeps_little_and_survives_kills(tmp_path: Path, store: Store) -> None:
    config = small(
        environment={"epochs": 2}, checkpoint={"every": 1, "max_unsaved": 50},
        retention={"last": 2, "every": 2, "payload": "needed"},
        storage={"flush_interval": 0.02, "snapshot_every": 4},
    )  # fmt: skip
    house = House(tmp_path, config, store=store)

    async def kills(one: House) -> None:
        dice = random.Random(0)
        await until(lambda: 6 in one.steps_seen, 60.0)
        one.kill("trainer", dice)
        await until(lambda: 9 in one.steps_seen, 60.0)
        one.kill("trainer", dice)
        one.kill("manager", dice)

    await house.run(kills, timeout=120.0)
    report = house.check()
    assert report.incarnations == 2
    assert [found.base >= 4 for found in house.resumed[1:]] == [True, True], "a restore begins at a newest checkpoint"
    ledger, _ = fold(store, RUN, 2)
    assert (len(ledger.checkpoints), ledger.checkpoints[-1].step) == (2, ledger.step)
    assert ledger.kept
    assert all(one.step % 2 == 0 for one in ledger.kept)
    assert ledger.retired == []
    check_orphans(store, ledger)
    assert delete_garbage(store, find_garbage(store, RUN, SystemClock(), 3600.0), pins=False) == []
    check_holds(store, ledger)
    proven = house.verify().as_dict()
    tidied = ("snapshots", "segments_retired")  # by gc, and by an archivist that had not ended
    assert {name: value for name, value in proven.items() if name not in tidied} == {
        name: value for name, value in report.as_dict().items() if name not in tidied
    }, "garbage is no part of what is proven"
    assert (report.checkpoints_kept, report.retired, report.deleted > 4) == (len(ledger.kept), report.deleted, True)
    assert report.payload_retired > 0
    for one in (*ledger.kept, *ledger.checkpoints):
        assert read_manifest(store, RUN, one.manifest, one.digest).step == one.step
    for block, found in ledger.blocks.items():
        assert store.size(PATHS.block(block)) == found.size, "what a redo needs is there"
    missing = ledger.kept[0]
    store.delete([PATHS.manifest(missing.manifest)])
    assert "missing" in "\n".join(house.verify().problems), "a kept checkpoint is proven like the others"


async def test_a_run_that_keeps_its_payload_proves_every_token(tmp_path: Path) -> None:
    house = House(tmp_path, small(checkpoint={"every": 2, "max_unsaved": 50}, retention={"last": 2}))
    await house.run()
    report = house.check()
    assert (report.payload_retired, report.deleted > 0) == (0, True)
    assert house.store is not None
    files = sorted(house.store.list(PATHS.payload))
    house.store.delete(files[:1])
    assert "no such object" in "\n".join(house.verify().problems)

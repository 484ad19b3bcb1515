"""`tidegate gc` deletes what was planted and nothing else: the listing afterwards is the one before, and the run is as
sound as it was."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import cli
from flows.seaweed import S3Server
from storage.clock import SystemClock, VirtualClock
from storage.filesystem import Littered
from storage.garbage import delete_garbage, find_garbage
from storage.journal import claim, find_end, fold, kept_snapshots
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.opening import open_store
from storage.pins import Pin, pin, unpin
from storage.restore import load_base, plan_restore
from storage.runs import RunPaths
from storage.verify import verify
from tests.faults.house import RUN, House, small, until
from tests.storage.test_snapshots import RUN as SNAPSHOT_RUN
from tests.storage.test_snapshots import Journal

PATHS = RunPaths(RUN)
OBJECT = PATHS.object("0" * 64)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a finished run with a checkpoint of each step, of which one is retired and pinned."""
    folder = tmp_path_factory.mktemp("finished")
    house = House(
        folder,
        small(checkpoint={"every": 1, "max_unsaved": 50}, retention={"last": 2}, storage={"snapshot_every": 1000}),
    )

    async def read(one: House) -> None:
        await until(lambda: bool(one.cluster.kinds("manager")) and bool(one.manager().control.ledger.checkpoints), 60.0)
        pin(LocalStore(folder), RUN, one.manager().control.ledger.checkpoints[0].manifest, "reader", SystemClock())

    asyncio.run(house.run(read))
    house.check()
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy to plant in."""
    return Path(shutil.copytree(finished, tmp_path / "store", copy_function=shutil.copy2))


def files(folder: Path) -> dict[str, bytes]:
    """Every file, temporary ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def gc(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert cli.main(["gc", RUN, "--storage", str(folder), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def counts(report: dict[str, Any]) -> dict[str, int]:
    return {kind: found["count"] for kind, found in report["kinds"].items() if found["count"]}


def still_good(folder: Path) -> None:
    store = LocalStore(folder)
    report = verify(store, RUN)
    assert report.sound, report.problems
    ledger, _ = fold(store, RUN, 2)
    assert load_base(store, plan_restore(ledger, RUN)).step == ledger.checkpoints[-1].step


def plant(folder: Path, key: str, data: bytes = b"garbage", age_s: float = 0.0) -> str:
    path = folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    then = SystemClock().wall() - age_s
    os.utime(path, (then, then))
    return key


def test_a_finished_run_has_no_garbage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    report = gc(folder, capsys)
    assert (counts(report), report["skipped"], report["failed"]) == ({}, {}, [])
    assert files(folder) == before


def test_exactly_what_was_planted_is_found_and_deleted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, _ = fold(LocalStore(folder), RUN, 2)
    plant(folder, f"{PATHS.checkpoints}/README")
    plant(folder, f"{PATHS.payload}/notes.arrow")
    plant(folder, f"{PATHS.objects}/.tmp-7-young")
    before = files(folder)
    planted = {
        "objects": OBJECT,
        "manifests": PATHS.manifest("000000099-000001.json"),
        "payload": PATHS.block("000001-worker-0-00099999"),
        "snapshots": PATHS.snapshot(3, "a" * 64),
        "temporary_files": f"{PATHS.objects}/.tmp-7-old",
    }
    for key in planted.values():
        plant(folder, key, age_s=7200.0)
    outside = plant(folder, "runs/other/objects/.tmp-7-old", age_s=7200.0)
    expired = PATHS.pin(ledger.checkpoints[0].manifest, "old")
    plant(folder, expired, msgspec.json.encode(Pin("m", "reader", 0.0)))
    there = files(folder)
    report = gc(folder, capsys, "--dry-run")
    assert files(folder) == there
    assert counts(report) == {**dict.fromkeys(planted, 1), "pins": 1}
    assert report["kinds"]["objects"]["bytes"] == len(b"garbage")
    assert counts(gc(folder, capsys)) == {**dict.fromkeys(planted, 1), "pins": 1}
    assert files(folder) == before | {outside: b"garbage", expired: there[expired]}
    assert counts(gc(folder, capsys, "--pins")) == {"pins": 1}
    assert files(folder) == before | {outside: b"garbage"}
    assert counts(gc(folder, capsys, "--pins", "--grace-hours", "-1")) == {"temporary_files": 1}
    still_good(folder)


def test_a_checkpoint_that_was_pinned_to_the_end_goes_when_it_is_unpinned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no manager any more to delete what is retired."""
    store = LocalStore(folder)
    ledger, _ = fold(store, RUN, 2)
    assert len(ledger.retired) == 1
    manifest = PATHS.manifest(ledger.retired[0].manifest)
    unpin(store, RUN, store.list(PATHS.pins)[0])
    before = files(folder)
    found = counts(gc(folder, capsys))
    assert (found.pop("manifests"), found.pop("objects") > 0, found) == (1, True, {})
    assert before.keys() - files(folder).keys() > {manifest}
    still_good(folder)


def test_a_damaged_checkpoint_keeps_every_object_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, _ = fold(LocalStore(folder), RUN, 2)
    (folder / PATHS.manifest(ledger.checkpoints[0].manifest)).write_bytes(b"damaged")
    plant(folder, OBJECT)
    report = gc(folder, capsys)
    assert counts(report) == {}
    assert "cannot be read" in report["skipped"]["objects"]
    assert OBJECT in files(folder)


def test_of_a_run_that_goes_on_only_that_goes_which_no_writer_can_come_to_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last record is taken away, and a next incarnation claims it."""
    store = LocalStore(folder)
    store.delete([PATHS.segment(find_end(store, RUN, 0) - 1)])
    claim(store, RUN, 2, owner="o", writer="w", reason="resume", clock=SystemClock())
    ledger, _ = fold(store, RUN, 2)
    assert (ledger.finished, ledger.incarnation) == ("", 2)
    for key in (
        OBJECT,  # a publication may be about to count on it
        PATHS.manifest("000000099-000002.json"),  # about to be recorded
        PATHS.block("000002-worker-0-00000001"),
        PATHS.snapshot(10**9, "a" * 64),
    ):
        plant(folder, key)
    before = files(folder)
    for key in (
        PATHS.manifest("000000099-000001.json"),
        PATHS.manifest("000000001-000002.json"),
        PATHS.block("000001-worker-0-00099999"),
    ):
        plant(folder, key)
    report = gc(folder, capsys)
    assert counts(report) == {"manifests": 2, "payload": 1}
    assert "resume the run" in report["skipped"]["objects"]
    assert files(folder) == before
    still_good(folder)


def test_snapshots_that_newer_ones_replaced_or_that_nobody_recorded_go() -> None:
    store = MemoryStore()
    journal = Journal(store)
    whole = store.delete
    store.delete = lambda keys: []  # type: ignore[method-assign] # an archivist that cannot delete
    for _ in range(6):
        journal.go_on(4)
        journal.archive()
    journal.go_on(2)
    store.delete = whole  # type: ignore[method-assign]
    paths = RunPaths(SNAPSHOT_RUN)
    newest = journal.ledger.snapshot
    assert newest is not None
    late = paths.snapshot(newest.slot + 1, "b" * 64)
    for key in (paths.snapshot(newest.slot, "b" * 64), paths.snapshot(2, "b" * 64), late):
        store.create(key, b"x")
    garbage = find_garbage(store, SNAPSHOT_RUN, VirtualClock(), 0.0)
    assert len(garbage.items["snapshots"]) == 3 + 2
    assert delete_garbage(store, garbage, pins=False) == []
    kept = {paths.snapshot(one.slot, one.digest) for one in kept_snapshots(store, SNAPSHOT_RUN)}
    assert set(store.list(paths.ledger)) == {*kept, late}
    assert len(kept) == 3
    assert verify(store, SNAPSHOT_RUN).sound


def test_multipart_uploads_below_the_run_are_aborted_and_no_others(seaweed: S3Server) -> None:
    store = open_store(seaweed.url("uploads"))
    assert isinstance(store, Littered)

    def begin(key: str) -> None:
        async def create(fs: Any) -> None:
            place = {"Bucket": store._location.bucket, "Key": store._location.key(key)}  # type: ignore[attr-defined]
            made = await fs._call_s3("create_multipart_upload", **place)
            await fs._call_s3("upload_part", **place, UploadId=made["UploadId"], PartNumber=1, Body=b"12345")

        store._repeat(create, key)  # type: ignore[attr-defined]

    begin("runs/r/objects/a")
    begin("runs/r/journal/b")
    begin("runs/rr/objects/c")
    now = SystemClock().wall()
    assert store.leftovers("runs/r", now - 3600.0) == []
    found = store.leftovers("runs/r", now + 3600.0)
    assert sorted((one.kind, one.name) for one in found) == [
        ("uploads", "runs/r/journal/b"),
        ("uploads", "runs/r/objects/a"),
    ]
    assert [one.size for one in found] == [5, 5]
    assert store.drop(found) == []
    assert store.leftovers("runs/r", now + 3600.0) == []
    assert [one.name for one in store.leftovers("runs/rr", now + 3600.0)] == ["runs/rr/objects/c"]
    assert store.drop(found) == [], "aborted by somebody else meanwhile"

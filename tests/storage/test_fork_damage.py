"""The way out of a damaged journal, and of checkpoints that cannot be read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from storage import fork as forking
from storage import schema
from storage.errors import (
    ArtifactCorrupt,
    ForkRefused,
    RestoreRefused,
    StorageUnusable,
    UnknownCheckpoint,
    UnknownRun,
)
from storage.filesystem import Bytes
from storage.journal import fold, read_journal
from storage.memory import MemoryStore
from storage.runs import RunPaths, open_run
from storage.segment import Row
from storage.survey import Survey, survey
from storage.verify import verify
from tests.simulation.world import RUN
from tests.storage.editing import finished_run, rewrite
from tests.storage.forking import NEW, description, fork, objects, refused

# ---------------------------------------------------------------------- damage


def damaged(store: MemoryStore, slot: int, how: str) -> None:
    key = RunPaths(RUN).segment(slot)
    data = bytearray(store.read(key))
    store.delete([key])
    if how == "flipped":
        data[len(data) // 2] ^= 4
        store.create(key, bytes(data))


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_journal_refuses_and_forks_from_the_last_good_position_on_request(how: str) -> None:
    sound = survey(finished_run(), RUN, 2)
    slots, outcomes = sound.slot, set[str]()
    for slot in range(slots):
        store = finished_run()
        if how == "missing" and slot == slots - 1:
            continue  # nobody can know that there was one
        damaged(store, slot, how)
        before = objects(store, RUN)
        refused(ForkRefused, f"tidegate fork {RUN} {NEW} --last-good", store, lambda store=store: fork(store))
        with pytest.raises(ArtifactCorrupt, match="tidegate fork RUN NEW --last-good"):
            fold(store, RUN, 2)
        good = [one for one in sound.checkpoints if one.position < first_of(slot) and published_in(one) != slot]
        if not good:
            with pytest.raises(UnknownCheckpoint, match="none before its damage"):
                fork(store, last_good=True)
            outcomes.add("nothing left")
            continue
        found = fork(store, last_good=True)
        assert found.damage is not None
        assert (found.damage["slot"], found.damage["segments_lost"]) == (slot, slots - slot - (how == "missing"))
        assert found.damage["segments_unreadable"] == (how == "flipped")
        assert found.step == max(record.step for record in good)
        report = verify(store, NEW)
        assert report.sound, report.problems
        assert not verify(store, RUN).sound
        assert objects(store, RUN) == before
        outcomes.add(f"step {found.step}")
    assert outcomes == {"nothing left", "step 1", "step 3"}


def first_of(slot: int) -> int:
    segment = next(one for one in read_journal(finished_run(), RUN) if one.header.slot == slot)
    return segment.header.first


def published_in(record: schema.CheckpointPublished) -> int:
    """The slot of a record that nobody can replace."""
    segments = read_journal(finished_run(), RUN)
    return next(one.header.slot for one in segments if any(row.record == record for row in one.rows))


def test_what_later_segments_still_say_is_listed_and_their_checkpoints_are_used() -> None:
    """The record that publishes a checkpoint lies behind the damage; the commit that proves its state does not."""
    store = finished_run()
    newest = survey(store, RUN, 2).checkpoints[-1]
    segments = list(read_journal(store, RUN))
    commit = next(s for s in segments if s.header.first <= newest.position <= s.header.last)
    record = next(s for s in segments if any(row.record == newest for row in s.rows))
    assert record.header.slot > commit.header.slot + 1
    damaged(store, commit.header.slot + 1, "flipped")
    found = fork(store, last_good=True)
    assert found.step == newest.step
    assert set(found.steps_left) <= set(range(newest.step + 1, 7))
    assert found.groups_left > 0
    assert verify(store, NEW).sound


def test_a_journal_whose_records_contradict_each_other_is_good_up_to_there() -> None:
    store = finished_run()

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        at = max(i for i, row in enumerate(rows) if isinstance(row.record, schema.StepCommitted))
        rows.insert(at, rows[at])
        incarnations.insert(at, incarnations[at])
        incarnations[at:] = [incarnations[at]] * len(incarnations[at:])

    rewrite(store, RUN, edit)
    with pytest.raises(ForkRefused, match="damaged at slot 0"):
        fork(store)


def test_last_good_of_a_whole_journal_is_a_plain_fork() -> None:
    store = finished_run()
    assert fork(store, last_good=True).damage is None


# ---------------------------------------------------------------------- checkpoints that cannot be read


def break_checkpoint(store: MemoryStore, step: int, kind: str) -> None:
    record = next(one for one in survey(store, RUN, 2).checkpoints if one.step == step)
    key = RunPaths(RUN).manifest(record.manifest)
    if kind == "objects":
        manifest = msgspec.json.decode(store.read(key))
        key = RunPaths(RUN).object(next(iter(manifest["objects"])))
    data = store.read(key)
    store.delete([key])
    if kind != "missing":
        store.create(key, data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("kind", ["manifest", "objects", "missing"])
def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before(kind: str) -> None:
    store = finished_run()
    break_checkpoint(store, 3, kind)
    found = fork(store)
    assert found.step == 1
    assert "checkpoint of step 3" in found.rejected[0]
    assert verify(store, NEW).sound
    with pytest.raises(ArtifactCorrupt):
        fork(store, 3, made=description(store, "named"))
    break_checkpoint(store, 1, kind)
    with pytest.raises(RestoreRefused, match=r"checkpoint of step 3.*checkpoint of step 1"):
        fork(store, made=description(store, "other"))
    assert not store.list(RunPaths(RUN).pins)
    with pytest.raises(UnknownRun):
        open_run(store, "other")


def test_a_manifest_of_a_state_that_was_never_committed_is_not_taken() -> None:
    store = finished_run()

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        for i, row in enumerate(rows):
            if isinstance(row.record, schema.StepCommitted) and row.record.step == 3:
                rows[i] = row._replace(record=msgspec.structs.replace(row.record, state_digest="0" * 64))

    rewrite(store, RUN, edit)
    with pytest.raises(ArtifactCorrupt, match="as committed"):
        fork(store, 3)


def test_a_checkpoint_that_is_retired_before_its_pin_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    store = finished_run()
    readings: list[int] = []

    def reading(*args: Any, **named: Any) -> Survey:
        found = survey(*args, **named)
        readings.append(len(store.list(RunPaths(RUN).pins)))
        if len(readings) == 2:
            found.checkpoints.clear()
        return found

    monkeypatch.setattr(forking, "survey", reading)
    with pytest.raises(UnknownCheckpoint, match="retired meanwhile"):
        fork(store, 3)
    assert readings == [0, 1], "the second reading is under the pin"
    assert not store.list(RunPaths(RUN).pins)
    with pytest.raises(UnknownRun):
        open_run(store, NEW)


def test_a_source_that_takes_no_pin_is_forked_to_another_store() -> None:
    held = finished_run()

    class ReadOnly(MemoryStore):
        def create(self, key: str, data: Bytes) -> None:
            raise StorageUnusable(key, expected="a writer", action="none")

    store = ReadOnly("sim")
    store._objects = held._objects  # pyright: ignore[reportPrivateUsage]
    target = MemoryStore("t")
    assert fork(store, to=target).step == 3
    assert verify(target, NEW).sound

"""A fork has the state and the place of its checkpoint, leaves the other run as it was, and is proven like any run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from storage import schema
from storage.errors import (
    FingerprintMismatch,
    ForkRefused,
    RunExists,
    UnknownCheckpoint,
    UnknownRun,
)
from storage.filesystem import Bytes
from storage.history import read_all
from storage.journal import fold, rows_of
from storage.ledger import Ledger
from storage.memory import MemoryStore
from storage.restore import load_base, plan_restore
from storage.runs import RunPaths, create_run, open_run
from storage.segment import Row
from storage.survey import survey
from storage.transitions import apply
from storage.verify import verify
from tests.simulation.shapes import SHAPES
from tests.simulation.world import RUN, World, play
from tests.storage.editing import finished_run, rewrite
from tests.storage.forking import NEW, description, fork, objects, refused

# ---------------------------------------------------------------------- what a fork is


@pytest.fixture(scope="module")
def large() -> list[World]:
    """Runs with everything in them: kills, evaluations, quarantine, several turns."""
    return [play(seed, replace(SHAPES["large"], checkpoints=0.5))[0] for seed in range(10, 20)]


def commits(store: MemoryStore) -> dict[int, tuple[int, schema.StepCommitted]]:
    rows = rows_of(read_all(store, RUN))
    return {row.record.step: (row.seq, row.record) for row in rows if isinstance(row.record, schema.StepCommitted)}


def at(store: MemoryStore, position: int) -> Ledger:
    """The ledger after one record, folded record by record."""
    ledger = Ledger(open_run(store, RUN).num_siblings)
    for row in rows_of(read_all(store, RUN)):
        if row.seq <= position:
            apply(ledger, row.seq, row.record)
    return ledger


def test_a_fork_has_the_state_and_the_source_position_of_its_checkpoint(large: list[World]) -> None:
    seen = 0
    for world in large:
        store, n = world.store, world.limits.num_siblings
        before = objects(store, RUN)
        for record in survey(store, RUN, n).checkpoints:
            seen += 1
            target = MemoryStore("t")
            found = fork(store, record.step, target)
            source, (ledger, _) = at(store, record.position), fold(target, NEW, n)
            position, commit = commits(store)[record.step]
            assert (found.step, found.position) == (record.step, position)
            assert (ledger.step, ledger.state_digest) == (record.step, found.state_digest)
            assert ledger.frontier == source.frontier
            assert ledger.consumed.intervals() == source.consumed.intervals()
            assert ledger.discarded.intervals() == source.discarded.intervals()
            assert ledger.quarantined == source.quarantined
            assert list(ledger.groups) == sorted(source.groups)
            assert all(group.rollouts[0].attempt == -1 for group in ledger.groups.values()), "from their prompts"
            assert ledger.recipe == source.recipe
            assert (ledger.lease, ledger.policy, ledger.due, ledger.blocks) == (None, None, {}, {})
            base = load_base(target, plan_restore(ledger, NEW))
            assert base.manifest is not None
            assert base.manifest.state_digest == ledger.state_digest
            assert commit.weights_digest == ledger.weights_digest or found.state_digest != commit.state_digest
            report = verify(target, NEW)
            assert report.sound, report.problems
            assert (report.handed_out, report.consumed) == (source.frontier, len(source.consumed))
            assert (report.inherited_consumed, report.requeued_by_fork) == (report.consumed, report.unsettled)
            assert report.forked_from == f"{RUN}@{record.step} in {store.url}"
        assert objects(store, RUN) == before, "no pin is left, nothing was touched"
    assert seen > 4


def test_by_default_it_is_of_the_newest_checkpoint_and_tells_what_is_left_behind() -> None:
    store = finished_run()
    newest = survey(store, RUN, 2).checkpoints[-1]
    found = fork(store)
    assert (found.step, found.damage, found.rejected) == (newest.step, None, [])
    leases = {row.record.step: row.record.groups for row in rows_of(read_all(store, RUN))
              if isinstance(row.record, schema.LeaseIssued)}  # fmt: skip
    assert found.steps_left == list(range(newest.step + 1, 7))
    assert found.groups_left == sum(len(leases[step]) for step in found.steps_left)


def test_a_position_lies_between_records_not_between_segments() -> None:
    """The same journal in one segment comes to the same forks."""
    store, whole = finished_run(), finished_run()
    rewrite(whole, RUN, lambda rows, incarnations: None)
    (only,) = read_all(whole, RUN)
    assert only.header.last > max(record.position for record in survey(store, RUN, 2).checkpoints)
    for step in (1, 3):
        made = [fork(one, step, MemoryStore(), made=description(one)) for one in (store, whole)]
        assert made[0] == made[1]
        assert made[0].frontier < 12


def test_a_fork_of_a_fork_is_one() -> None:
    store = finished_run()
    first = fork(store)
    second = fork(store, source=NEW, made=description(store, "c", NEW))
    assert (second.run, second.step, second.state_digest) == (NEW, first.step, first.state_digest)
    assert verify(store, "c").sound
    ledgers = [fold(store, name, 2)[0] for name in (NEW, "c")]
    assert ledgers[0].consumed.intervals() == ledgers[1].consumed.intervals()
    assert list(ledgers[0].groups) == list(ledgers[1].groups)


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.created: list[str] = []

    def create(self, key: str, data: Bytes) -> None:
        super().create(key, data)
        self.created.append(key)


def test_an_object_that_is_there_is_proven_and_not_written_again() -> None:
    store, target = finished_run(), Counting()
    whole = fork(store, 1, MemoryStore())
    copied = fork(store, 1, target, made=description(store, NEW))
    assert copied.written == whole.written
    (mine,) = [name for name in target.created if "/objects/" in name]
    again = Counting()
    again.create(mine, target.read(mine))
    again.created.clear()
    found = fork(store, 1, again)
    assert mine not in again.created
    assert found.written == whole.written - len(target.read(mine))
    broken = MemoryStore()
    broken.create(mine, b"x" + target.read(mine)[1:])
    with pytest.raises(ForkRefused, match="left by an earlier fork"):
        fork(store, 1, broken)


def test_settings_that_were_changed_since_the_run_began_are_told_unless_the_fork_has_them() -> None:
    store = finished_run()

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        at = next(i for i, row in enumerate(rows) if isinstance(row.record, schema.GroupReserved))
        changes = {"training.learning_rate": "0.1 -> 0.5", "checkpoint.every": "3 -> 7"}
        rows.insert(at, rows[at]._replace(record=schema.ConfigChanged(changes)))
        incarnations.insert(at, incarnations[at])
        for i, row in enumerate(rows):
            if isinstance(row.record, schema.CheckpointPublished):
                moved = msgspec.structs.replace(row.record, position=row.record.position + 1)
                rows[i] = row._replace(record=moved)

    rewrite(store, RUN, edit)
    made = description(store, settings={"checkpoint": {"every": 7}})
    assert fork(store, made=made).settings_left == {"training.learning_rate": "0.5"}


# ---------------------------------------------------------------------- refusals


def test_what_cannot_be_forked_is_the_users_mistake_and_writes_nothing() -> None:
    store = finished_run()
    refused(UnknownCheckpoint, "checkpoints of steps: 1, 3", store, lambda: fork(store, 2))
    refused(UnknownRun, "'nobody'", store, lambda: fork(store, source="nobody", made=description(store)))
    refused(RunExists, "a run of its own", store, lambda: fork(store, made=description(store, RUN)))
    fork(store, 1)
    refused(RunExists, f"a complete fork of {RUN}@1", store, lambda: fork(store, 1))
    refused(RunExists, f"tidegate resume {NEW}", store, lambda: fork(store, 3))
    create_run(store, description(store, "plain"))
    refused(RunExists, "a run of its own", store, lambda: fork(store, made=description(store, "plain")))


@pytest.mark.parametrize("name", ["source", "model", "anything"])
def test_data_or_a_model_of_another_meaning_is_refused(name: str) -> None:
    store = finished_run()
    made = description(store, fingerprints={name: "x"})
    refused(FingerprintMismatch, f"{name} = x", store, lambda: fork(store, made=made))


def test_environment_bound_and_group_size_may_change_because_groups_start_whole(large: list[World]) -> None:
    store, n, step = next(
        (world.store, world.limits.num_siblings, record.step)
        for world in large
        for record in survey(world.store, RUN, world.limits.num_siblings).checkpoints
        if at(world.store, record.position).quarantined
    )
    for num in (n - 1, n + 1):
        target = MemoryStore()
        made = description(store, num_siblings=num, staleness=5, fingerprints={"environment": "other"})
        fork(store, step, target, made=made)
        ledger, _ = fold(target, NEW, num)
        assert ledger.quarantined
        assert {len(one.attempts) for one in ledger.quarantined.values()} == {num}
        assert verify(target, NEW).sound


# ---------------------------------------------------------------------- verify


def altered(change: Callable[[schema.Forked], schema.Forked]) -> str:
    store = finished_run()
    fork(store)

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        assert isinstance(rows[1].record, schema.Forked)
        rows[1] = rows[1]._replace(record=change(rows[1].record))

    rewrite(store, NEW, edit)
    report = verify(store, NEW)
    assert not report.sound
    return "\n".join(report.problems)


def test_verify_finds_a_fork_that_was_edited() -> None:
    replace = msgspec.structs.replace
    assert "holds state" in altered(lambda one: replace(one, state_digest="0" * 64))
    assert "a fork of sim@3 says that it is one of other@3" in altered(lambda one: replace(one, run="other"))
    assert "in at most one place" in altered(lambda one: replace(one, discarded=one.consumed))
    assert "sha256" in altered(lambda one: replace(one, checkpoint=replace(one.checkpoint, digest="0" * 64)))


def test_verify_finds_a_fork_whose_description_says_nothing_of_it() -> None:
    store = finished_run()
    fork(store)
    info = open_run(store, NEW)
    other = MemoryStore()
    create_run(other, msgspec.structs.replace(info, origin=None))
    store.delete([RunPaths(NEW).info])
    store.create(RunPaths(NEW).info, other.read(RunPaths(NEW).info))
    assert "run.json says that the run is a fork of None" in verify(store, NEW).problems[0]

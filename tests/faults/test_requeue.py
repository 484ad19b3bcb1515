"""Runs whose restored trainers take committed steps back instead of training them again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from storage import schema
from storage.history import read_all
from storage.inspection import steps as committed_steps
from storage.ledger import Ledger
from storage.runs import RunPaths
from storage.verify import Report
from tasks.metrics import last_written
from tests.faults.house import RUN, House, small, until

SUITE = {"name": "words", "environment": "reverse", "options": {"letters": 2}, "tasks": 2}


def requeueing(folder: Path, **changes: object) -> House:
    values = {"every": 3, "max_unsaved": 50, "redo": "requeue", **changes}
    return House(folder, small(checkpoint=values, environment={"options": {"letters": 3}}))


def ledger(house: House) -> Ledger | None:
    """Of the living manager."""
    living = house.cluster.kinds("manager")
    return house.manager().control.ledger if living else None


async def trained(house: House, count: int) -> None:
    """So many more steps have been committed in this attempt and its retries, and the trainer lives."""
    goal = len(house.steps_seen) + count
    await until(lambda: len(house.steps_seen) >= goal and bool(house.cluster.kinds("trainer")))


def records(house: House) -> list[schema.Record]:
    return [row.record for segment in read_all(house.store, RUN) for row in segment.rows]


def check_lineage(house: House) -> Report:
    """Each ordinal is consumed once in the lineage that survived, and nothing was trained again in place."""
    report = house.check()
    history = committed_steps(house.store, RUN)
    assert [entry["step"] for entry in history] == list(range(1, report.steps + 1))
    groups = sorted(ordinal for entry in history for ordinal in entry["groups"])
    assert groups == list(range(house.length))
    found = records(house)
    assert not any(isinstance(record, schema.StepRedone) for record in found)
    reverted = [record for record in found if isinstance(record, schema.StepsReverted)]
    assert report.steps_reverted == sum(record.from_step - record.to_step for record in reverted)
    assert report.groups_reverted == 2 * report.steps_reverted
    versions = [(r.incarnation, r.number) for r in found if isinstance(r, schema.PolicyPublished)]
    assert len(set(versions)) == len(versions), "no version is two states"
    assert versions == sorted(versions)
    return report


@pytest.mark.parametrize("seed", range(3))
async def test_a_run_whose_trainers_are_killed_trains_each_group_once_in_the_surviving_lineage(
    tmp_path: Path, seed: int
) -> None:
    house, dice = requeueing(tmp_path), random.Random(seed)

    async def chaos(house: House) -> None:
        for _ in range(3):
            await trained(house, 2)
            await asyncio.sleep(dice.uniform(0.0, 0.05))
            house.kill("trainer", dice)

    await house.run(chaos)
    report = check_lineage(house)
    assert report.incarnations > 1, "steps are reverted in an incarnation of their own"
    assert report.steps_reverted > 0
    assert sum(one.reverted for one in house.resumed) == report.steps_reverted


async def test_a_warm_trainer_has_nothing_to_take_back(tmp_path: Path) -> None:
    house = requeueing(tmp_path)

    async def chaos(house: House) -> None:
        for _ in range(3):
            await trained(house, 2)
            house.kill("driver", random.Random(0))

    await house.run(chaos)
    report = check_lineage(house)
    assert all(one.warm for one in house.resumed[1:])
    assert len(house.resumed) == 4
    assert (report.steps_reverted, report.incarnations) == (0, 1)


async def test_a_damaged_newest_checkpoint_takes_the_run_further_back(tmp_path: Path) -> None:
    house = requeueing(tmp_path, every=2)
    damaged: list[int] = []

    async def chaos(house: House) -> None:
        await until(lambda: (found := ledger(house)) is not None and len(found.checkpoints) >= 2)
        found = ledger(house)
        assert found is not None
        older, newest = found.checkpoints[-2:]
        damaged.extend([newest.step, older.step])
        path = tmp_path / RunPaths(RUN).manifest(newest.manifest)
        path.write_bytes(path.read_bytes()[:-9])
        house.kill("trainer", random.Random(0))

    await house.run(chaos)
    report = check_lineage(house)
    resumed = next(one for one in house.resumed if one.reverted)
    assert len(resumed.rejected) >= 1
    assert f"checkpoint of step {damaged[0]}" in resumed.rejected[-1]
    assert resumed.base == damaged[1]
    assert report.steps_reverted >= damaged[0] - damaged[1]
    assert house.store is not None
    for last, incarnation in ((resumed.base + 5, resumed.incarnation - 1), (resumed.base + 2, resumed.incarnation)):
        written = f"{RunPaths(RUN).metrics}/events.out.tfevents.{last:010d}.{incarnation:06d}-000001.000001"
        house.store.create(written, b"")
    assert last_written(house.store, RUN) == resumed.base + 2, "curves of steps that were taken back are written again"


async def test_evaluations_of_steps_that_were_taken_back_are_measured_again_and_count_once(tmp_path: Path) -> None:
    config = small(
        environment={"options": {"letters": 3}},
        checkpoint={"every": 6, "max_unsaved": 50, "redo": "requeue"},
        evaluation={"every": 1, "suites": [SUITE], "deadline": 5.0},
    )
    house = House(tmp_path, config)

    async def chaos(house: House) -> None:
        await until(lambda: (found := ledger(house)) is not None and any(step >= 3 for _, step in found.evaluated))
        house.kill("trainer", random.Random(0))

    await house.run(chaos)
    report = check_lineage(house)
    assert report.steps_reverted > 0
    assert (report.evaluations, report.evaluations_due) == (report.steps, 0)
    found = [r for r in records(house) if isinstance(r, schema.EvaluationDone)]
    assert len(found) > report.steps, "those of reverted steps have two results, of two states"

"""Ten-turn rollouts on Ray whose every turn has a side effect, and kill -9 of real processes at seeded moments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from storage import schema
from storage.errors import TidegateError
from storage.verify import Report
from tests.composition import ledgered
from tests.composition.ledgered import TURNS, written
from tests.composition.rig import GPU, Rig, until

pytestmark = [*GPU]
MOMENTS = max(5, int(os.environ.get("TIDEGATE_TURNS", "0")))
KILLS = 5
"""In one run."""
TASKS, SIBLINGS = 6, 2
CALLS = TASKS * SIBLINGS * TURNS
DYING = (TidegateError, RayActorError)
"""What an attempt ends with, or a look at a process, when it is being killed."""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, tasks=TASKS, name=ledgered.NAME, generation={"max_length": 96})
    yield made
    await made.cluster.close()


class Killer:
    """Kills when so many answers have been acted on. `dead` are the kinds that were hit."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig, self._dice = rig, random.Random(f"turns {seed}")
        self._moments = sorted(self._dice.sample(range(4, CALLS - 25), KILLS))
        kinds = ["worker", "manager", "engine", "worker", "trainer"]
        self._dice.shuffle(kinds)
        self._kinds = kinds
        self.dead: list[str] = []

    async def run(self) -> None:
        for moment, kind in zip(self._moments, self._kinds, strict=True):
            while await asyncio.to_thread(self._answers) < moment:  # noqa: ASYNC110 - other processes write it
                await asyncio.sleep(0.01)
            await until(lambda kind=kind: self._kill(kind), f"a {kind} to kill")

    async def _kill(self, kind: str) -> bool:
        """False while there is none."""
        with contextlib.suppress(LookupError, *DYING):
            await self._rig.kill(kind)
            self.dead.append(kind)
            return True
        return False

    def _answers(self) -> int:
        return len(self._rig.records(schema.ModelAnswered))


async def through(rig: Rig) -> Report:
    """Drive to the end, retried as the Retry button does."""
    for _ in range(20):
        try:
            resumed = await rig.drive()
            return await rig.finish(resumed.step + 1)
        except DYING:
            await asyncio.sleep(0.05)
    raise AssertionError("not finished after 20 attempts")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(MOMENTS // KILLS)]
)
async def test_processes_that_are_killed_during_ten_turn_rollouts_cost_the_turns_in_flight_and_no_effect_comes_twice(
    rig: Rig, tmp_path: Path, seed: int
) -> None:
    killer = Killer(rig, seed)
    killing = asyncio.create_task(killer.run())
    report = await through(rig)
    await killing
    assert len(killer.dead) == KILLS
    assert report.sound
    files = written(tmp_path / "words")
    roots = _roots(rig)
    assert len(roots) == TASKS * SIBLINGS
    for (group, sibling), root in roots.items():
        (found,) = [turns for name, turns in files.items() if f"g{group}%2F{sibling}~{root}." in name]
        assert found == list(range(1, TURNS + 1)), "each effect of the surviving lineage once"
    asked = Counter((one.group, one.sibling, one.turn) for one in rig.records(schema.ModelAnswered))
    again = sum(asked.values()) - len(asked)
    assert again == 0, "an answer that was acted on is never generated again"
    assert not rig.records(schema.ContinuationDiscarded)


def _roots(rig: Rig) -> dict[tuple[int, int], int]:
    """The attempt that each rollout's lineage began with."""
    found: dict[tuple[int, int], int] = {}
    for row in rig.rows():
        record = row.record
        if isinstance(record, schema.GroupsDispatched):
            groups = range(record.first, record.first + record.count)
            found.update({(group, sibling): 0 for group in groups for sibling in range(record.siblings)})
        elif isinstance(record, schema.AttemptsMinted):
            for sibling, attempt, boundary in zip(record.siblings, record.attempts, record.boundaries, strict=True):
                if boundary < 0:
                    found[record.group, sibling] = attempt
    return found

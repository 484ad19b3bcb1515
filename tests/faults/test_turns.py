"""Rollouts of ten turns, each of which changes a resource, while processes of every kind are killed: each effect once,
each prompt one final state, coordinates that only go forward, and nothing generated again but turns in flight."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpu.generation.engine import Cached, GenRequest
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.spec import RunSpec
from storage import schema
from storage.history import read_all
from storage.ledger import Ledger
from storage.payload import decode_block
from storage.reader import PayloadReader
from storage.samples import assemble
from storage.transitions import apply
from tests.faults import talkative
from tests.faults.house import RUN, House, small, until
from tests.faults.talkative import EFFECTS, TURNS

MOMENTS = max(5, int(os.environ.get("TIDEGATE_TURNS", "0")))
KINDS = ("worker", "engine", "manager", "driver", "trainer")
TASKS, SIBLINGS = 12, 2


class Counting(FakeEngine):
    """Notes every request that it gets. Tokens depend on the rollout and the turn alone."""

    def __init__(self, asked: list[str]) -> None:
        super().__init__(slots=8, tokens=1, vocabulary=40, by_rollout=True)
        self._asked = asked

    def add(self, request: GenRequest) -> None:
        self._asked.append(request.id)
        super().add(request)


@dataclass
class Killed:
    """A run with its kills: `asked` are the model calls, `dead` what was killed."""

    house: House
    asked: list[str] = field(default_factory=lambda: [])
    dead: list[str] = field(default_factory=lambda: [])


def run_of(folder: Path, *, mixed: bool = False) -> Killed:
    world = str(folder)
    config = small(
        environment={"name": talkative.NAME, "options": {"world": world, "tasks": TASKS, "mixed": mixed}},
        rollout={"siblings": SIBLINGS, "executing": 12},
        generation={"max_length": 64},
    )
    asked: list[str] = []

    def engine(spec: RunSpec) -> EngineServer:
        return EngineServer(Counting(asked), Cached.KEEP)

    return Killed(House(folder, config, engine=engine), asked)


async def play(run: Killed, dice: random.Random, kinds: tuple[str, ...], kills: int, *, twice: bool = False) -> None:
    """Kill at moments counted in durable boundaries; `twice`: directly again, before anything else is saved."""
    house = run.house
    moments = sorted(dice.sample(range(2, TASKS * SIBLINGS * TURNS - 20), kills))

    def boundaries() -> int:
        return house.manager().control.ledger.counts["model_answered"] if house.cluster.kinds("manager") else -1

    async def chaos(house: House) -> None:
        for moment in moments:
            await until(lambda moment=moment: boundaries() >= moment, 90.0)
            kind = dice.choice(kinds)
            if house.kill(kind, dice):
                run.dead.append(kind)
            if twice:
                await until(lambda kind=kind: bool(house.cluster.kinds(kind)), 90.0)
                await asyncio.sleep(dice.random() * 0.02)
                run.dead += [kind] * house.kill(kind, dice)

    await house.run(chaos, timeout=120.0)
    house.check()


# ---------------------------------------------------------------------- what is looked at


def records(house: House) -> Iterator[schema.Record]:
    for segment in read_all(house.store, RUN):
        for row in segment.rows:
            yield row.record


def check_coordinates(house: House) -> None:
    """Boundaries go up by one over each rollout, whatever happened; no request is intended or answered twice."""
    last: Counter[tuple[int, int]] = Counter()
    roots: dict[tuple[int, int], int] = {}
    intents: Counter[tuple[int, ...]] = Counter()
    for record in records(house):
        if isinstance(record, schema.AttemptsMinted):
            for sibling, attempt, boundary in zip(record.siblings, record.attempts, record.boundaries, strict=True):
                if boundary < 0:
                    roots[record.group, sibling] = attempt
        elif isinstance(record, schema.ModelAnswered | schema.TurnCommitted):
            key = record.group, record.sibling
            assert record.boundary == last[key]
            last[key] += 1
        elif isinstance(record, schema.RequestIntent):
            root = roots.get((record.group, record.sibling), 0)
            intents[record.group, record.sibling, root, record.boundary, record.cursor] += 1
    assert set(intents.values()) == {1}


def check_effects(run: Killed) -> None:
    """Every request took effect at most once; of the lineage that was sealed, each exactly once."""
    effects = EFFECTS[str(run.house.folder)]
    assert set(effects.values()) == {1}
    newest: dict[str, int] = {}
    for request in effects:
        rollout, _, rest = request.partition("~")
        newest[rollout] = max(newest.get(rollout, 0), int(rest.split(".")[0]))
    sealed = Counter(
        request.partition("~")[0]
        for request in effects
        if int(request.partition("~")[2].split(".")[0]) == newest[request.partition("~")[0]]
    )
    assert len(sealed) == TASKS * SIBLINGS
    assert set(sealed.values()) <= {TURNS, TURNS + 1}


def regenerated(run: Killed) -> int:
    """Model calls beyond one per turn."""
    return sum(count - 1 for count in Counter(_turn(name) for name in run.asked).values())


def _turn(request: str) -> str:
    return f"{request.partition('~')[0]}.{request.rpartition('.')[2]}"


def content(house: House) -> dict[int, list[tuple[list[int], list[int], float]]]:
    """What each group was trained with, whoever generated it."""
    ledger, found = Ledger(SIBLINGS), {}
    reader = PayloadReader(house.store, RUN)
    for segment in read_all(house.store, RUN):
        for row in segment.rows:
            apply(ledger, row.seq, row.record)
            if isinstance(row.record, schema.PayloadStored) and row.blob is not None:
                reader.remember(row.record.block, decode_block(row.blob, row.record.digest, row.record.block))
            if isinstance(row.record, schema.StepCommitted):
                for group in ledger.steps[row.record.step].lease.groups:
                    slots = assemble([reader.rows(one, ledger.blocks) for one in group.rows], group.ordinal, SIBLINGS)
                    found[group.ordinal] = [
                        (sample.tokens.tolist(), sample.mask.tolist(), sample.reward)
                        for slot in slots
                        for sample in slot
                    ]
    return found


# ---------------------------------------------------------------------- the promise


async def test_a_run_that_nobody_kills_is_what_the_others_are_compared_with(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    await run.house.run()
    run.house.check()
    check_coordinates(run.house)
    check_effects(run)
    assert (len(run.asked), regenerated(run)) == (TASKS * SIBLINGS * TURNS, 0)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice in a row"])
@pytest.mark.parametrize("seed", range(MOMENTS))
async def test_kills_during_ten_turn_rollouts_cost_the_turns_in_flight_and_nothing_else(
    seed: int, twice: bool, tmp_path: Path
) -> None:
    dice = random.Random(f"turns {seed}")
    kinds = (KINDS[seed % len(KINDS)],)
    whole, run = run_of(tmp_path / "whole"), run_of(tmp_path / "killed")
    await whole.house.run()
    await play(run, dice, kinds, kills=2, twice=twice)
    assert run.dead
    check_coordinates(run.house)
    check_effects(run)
    live = run.house.spec.limits.max_executing
    deaths = len(run.dead) if kinds[0] in ("worker", "manager", "engine") else 0
    assert regenerated(run) <= deaths * live, "one turn of each live rollout at most"
    assert content(run.house) == content(whole.house)


@pytest.mark.parametrize("seed", range(max(2, MOMENTS // 5)))
async def test_only_rollouts_that_changed_what_can_only_restart_start_over(seed: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, mixed=True)
    await play(run, random.Random(f"mixed {seed}"), ("worker", "manager"), kills=3)
    check_coordinates(run.house)
    check_effects(run)
    discarded = [record for record in records(run.house) if isinstance(record, schema.ContinuationDiscarded)]
    stream = run.house.spec.source.stream(run.house.spec.source.environment_of())
    for record in discarded:
        assert record.reason.startswith("restart_only")
        assert all(stream.position(group).row % talkative.MIXED == 0 for group in record.groups)

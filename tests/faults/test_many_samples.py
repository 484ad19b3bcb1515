"""Whole runs whose rollouts yield several samples: killed in the middle of a second sample they come to the same state
as never killed, and a context that cannot be is an attempt that failed, not a process that died."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.generation.engine import Cached, Generated
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from storage import schema
from storage.history import read_all
from storage.inspection import group_history
from storage.inspection import steps as committed_steps
from tests.faults.house import RUN, House, small, until

GUESSING = {"name": "guess", "options": {"letters": 4, "turns": 4, "compact_every": 2}, "epochs": 4}
KILLS = ((1, "worker"), (2, "manager"), (4, "trainer"), (6, "engine"))
"""Not before that step. The trainer dies after a checkpoint and a step beyond it, and is whole again when the engine
dies, which needs its weights."""
EXACT = ("reward_mean", "loss", "grad_norm", "trained_groups", "trained_tokens", "tokens_mean", "samples")


class Moment:
    """Generation stands still from the first second sample after step `step` on, while there is such a step: the moment
    cannot pass unseen, however slow the machine."""

    def __init__(self) -> None:
        self.house: House | None = None
        self.step: int | None = None

    def still(self, requests: Collection[str]) -> bool:
        return self.reached() and any(name.endswith(".3") for name in requests)

    def reached(self) -> bool:
        if self.house is None or self.step is None or not self.house.cluster.kinds("manager"):
            return False
        return self.house.manager().control.ledger.step >= self.step


class Unhurried(FakeEngine):
    """Takes a moment for each token, so that turns lie apart."""

    def __init__(self, moment: Moment, **options: object) -> None:
        super().__init__(slots=16, **options)  # type: ignore[arg-type]
        self._moment = moment

    def step(self) -> list[Generated]:
        time.sleep(0.01)
        while self._moment.still(list(self._requests)):
            time.sleep(0.001)
        return super().step()


def house_of(folder: Path, environment: dict[str, object], moment: Moment | None = None, **rollout: object) -> House:
    """On-policy, so that arrival order does not matter; the tokens depend on the rollout and the turn alone."""
    config = small(
        environment=environment,
        rollout={"siblings": 4, "staleness": 0, "executing": 16, **rollout},
        generation={"workers": 1, "engines": 1},
        storage={"flush_interval": 0.002},
    )
    moment = moment or Moment()
    engine = {"tokens": 99, "vocabulary": 6, "by_rollout": True}
    moment.house = House(folder, config, engine=lambda spec: EngineServer(Unhurried(moment, **engine), Cached.KEEP))
    return moment.house


@dataclass(frozen=True)
class Outcome:
    """What storage says of each step: state, weights, groups, exact metrics."""

    states: list[str]
    weights: list[str]
    groups: list[tuple[int, ...]]
    metrics: list[dict[str, Any]]


def outcome(house: House) -> Outcome:
    house.check()
    found = committed_steps(house.store, RUN)
    records = [row.record for segment in read_all(house.store, RUN) for row in segment.rows]
    return Outcome(
        [entry["state_digest"] for entry in found],
        [record.weights_digest for record in records if isinstance(record, schema.StepCommitted)],
        [tuple(sorted(entry["groups"])) for entry in found],
        [{name: entry[name] for name in EXACT} for entry in found],
    )


def in_second_sample(house: House) -> bool:
    """A durable turn of a second sample is the last one of a live rollout."""
    if not house.cluster.kinds("manager"):
        return False
    control = house.manager().control
    rollouts = [rollout for group in control.ledger.groups.values() for rollout in group.rollouts]
    live = [r for r in rollouts if r.state.value == "live" and r.boundary is not None and r.boundary.turn == 2]
    return any(r.boundary.sample == 1 for r in live) and control.books.journal.undurable_age() == 0


async def test_kills_in_the_middle_of_a_second_sample_change_nothing_of_what_a_run_comes_to(tmp_path: Path) -> None:
    quiet = house_of(tmp_path / "quiet", GUESSING)
    await quiet.run()
    reference = outcome(quiet)
    assert quiet.attempts == 1
    slots = [4 * len(groups) for groups in reference.groups]
    assert any(step["samples"] > n for step, n in zip(reference.metrics, slots, strict=True)), "several samples"
    assert len({step["samples"] for step in reference.metrics}) > 1, "and not all as many"
    assert len(set(reference.weights)) > 3, "the steps changed the weights"
    moment, killed = Moment(), list[str]()
    house = house_of(tmp_path / "killed", GUESSING, moment)

    async def chaos(house: House) -> None:
        for step, victim in KILLS:
            moment.step = step
            await until(lambda: moment.reached() and in_second_sample(house))
            assert house.kill(victim, random.Random(0))
            killed.append(victim)
            moment.step = None

    await house.run(chaos)
    assert killed == [victim for _, victim in KILLS]
    assert outcome(house) == reference
    report = house.verify()
    assert report.rollouts_continued > 0, "rollouts went on from inside their second sample"
    assert any(resumed.redone for resumed in house.resumed), "steps were trained again from the journal"
    assert (report.steps_redone > 0, report.steps_diverged) == (True, 0)


async def test_a_context_without_a_prompt_is_malformed_and_stops_neither_worker_nor_manager(tmp_path: Path) -> None:
    environment = {"name": "tests.gpu.test_contexts:Agents", "options": {"says": ""}, "epochs": 1}
    house = house_of(tmp_path, environment, attempts=2)
    await house.run()
    report = house.verify()
    assert report.sound, report.problems
    assert (report.handed_out, report.quarantined, report.consumed) == (4, 4, 0)
    assert (house.attempts, report.incarnations) == (1, 1)
    ended = [entry for entry in group_history(house.store, RUN, 2) if entry["kind"] == "attempt_abandoned"]
    assert {entry["reason"] for entry in ended} == {"malformed"}
    assert all("empty context" in entry["detail"] for entry in ended)

"""In simulated worlds the manager dies right before, and right after, each segment of the run: whatever the segment
says, the run ends as the oracle and `verify` demand. Virtual time, no threads: a failure repeats by its parameters."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

import pytest

from storage import schema
from storage.errors import CommitUnknown, StoreUnavailable
from storage.filesystem import Bytes
from storage.segment import decode_segment
from storage.verify import Report
from tests.simulation.shapes import SHAPES
from tests.simulation.store import JOURNAL
from tests.simulation.world import World

SEEDS = range(min(20, int(os.environ.get("TIDEGATE_BOUNDARIES", "0")) or 2))
CHAOS = 60
SHAPE = replace(SHAPES["large"], lengths=(6,), alterations=0.0, races=0.0, checkpoints=0.5, snapshot_every=(3,))


class Death:
    """The manager of `world`, or a claimant, dies at segment `at` of the run, which is stored only when `phase` is
    "after". `kinds` are those of the segment's records."""

    def __init__(self, world: World, at: int, phase: str) -> None:
        self.world, self.at, self.phase = world, at, phase
        self.kinds: set[str] = set()
        self.segments, self._due = 0, False
        self._create, self._step = world.store.create, world.step
        world.store.create, world.step = self.create, self.step  # type: ignore[method-assign]

    def create(self, key: str, data: Bytes) -> None:
        if JOURNAL not in key:
            return self._create(key, data)
        number, self.segments = self.segments, self.segments + 1
        if number != self.at:
            return self._create(key, data)
        rows = decode_segment(bytes(data), key).rows
        self.kinds = {schema.KIND_OF[type(row.record)] for row in rows}
        self._due = not self.world.claiming  # a claimant is dead when it gets no answer
        if self.phase == "before":
            raise StoreUnavailable("dead", expected="an answer", action="none")
        self._create(key, data)
        raise CommitUnknown("dead", expected="a reply", action="none")

    def step(self) -> None:
        self._step()
        if self._due:
            self._due = False
            self.world.kill_manager()


def play(seed: int, at: int, phase: str) -> tuple[Death, Report]:
    """The world of a seed with this death; of others its seed decides, as in every world."""
    dice = random.Random(f"segments {seed}")
    world = World(seed, length=6, multi_turn=dice.random() < 0.7, shape=SHAPE)
    world.store.faults = False
    death = Death(world, at, phase)
    return death, world.run(chaos=CHAOS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_manager_that_dies_at_any_segment_is_succeeded_without_a_trace(seed: int) -> None:
    whole, _ = play(seed, -1, "")
    seen: Counter[str] = Counter()
    for at in range(whole.segments):
        for phase in ("before", "after"):
            death, report = play(seed, at, phase)
            assert report.sound, (at, phase, report.problems)
            assert death.kinds, "the death must have come"
            seen.update(death.kinds)
    assert len(seen) >= 12, seen


RARE = {
    "lease_rolled_back", "quarantine_released", "group_quarantined", "step_redone", "steps_reverted",
    "continuation_discarded", "forked", "ack_done", "obligation_expired",
}  # fmt: skip
"""They need a person, a refused filter, many failures or a damaged checkpoint, and the campaigns meet them in longer
worlds; or a fork, or a host that keeps results, which these worlds do not have."""


@pytest.mark.slow
def test_over_some_worlds_every_kind_of_record_but_rare_ones_is_on_its_way_at_a_death() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        whole, _ = play(seed, -1, "")
        dice = random.Random(seed)
        for at in dice.sample(range(whole.segments), min(8, whole.segments)):
            death, report = play(seed, at, "after")
            assert report.sound, (seed, at, report.problems)
            seen.update(death.kinds)
    assert set(schema.KINDS) - seen.keys() <= RARE

"""Thousands of seeded interleavings of reserve, finish, fail, hold, lease, kill and restore, in virtual time."""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.world import World

SEEDS = int(os.environ.get("TIDEGATE_SIMULATIONS", "600"))
BATCH = 100


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_interleaving_settles_each_ordinal_once_and_makes_progress(first: int) -> None:
    totals: dict[str, int] = {}
    for seed in range(first, min(first + BATCH, SEEDS)):
        dice = random.Random(seed)
        try:
            report = World(seed, length=dice.choice([5, 10, 14])).run(chaos=dice.choice([60, 150, 300]))
        except Exception as error:
            raise AssertionError(f"reproduce with World({seed}): {error}") from error
        for name in ("incarnations", "steps", "consumed", "rollouts_reused", "rollouts_regenerated", "steps_redone"):
            totals[name] = totals.get(name, 0) + getattr(report, name)
    # The world would prove nothing if its faults did not happen.
    assert totals["incarnations"] > BATCH
    assert min(totals["rollouts_reused"], totals["rollouts_regenerated"], totals["steps_redone"]) > 0


def test_a_run_without_faults_needs_one_incarnation_and_regenerates_nothing() -> None:
    for seed in range(10):
        world = World(seed, length=12)
        report = world.run(chaos=0)
        assert (report.incarnations, report.rollouts_regenerated, report.steps_redone) == (1, 0, 0)


def test_a_seed_reproduces_its_interleaving_exactly() -> None:
    def journal(seed: int) -> list[bytes]:
        world = World(seed, length=8)
        world.run(chaos=200)
        return [world.store.read(key) for key in sorted(world.store.list("runs/sim/journal"))]

    assert journal(77) == journal(77)
    assert journal(77) != journal(78)

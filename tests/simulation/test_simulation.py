"""Thousands of seeded interleavings of reserve, finish, fail, hold, lease, kill and restore, in virtual time."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.world import World

SEEDS = int(os.environ.get("TIDEGATE_SIMULATIONS", "2000"))
PART, BATCH = 500, 25
NAMES = ("incarnations", "steps", "consumed", "rollouts_reused", "rollouts_regenerated", "steps_redone")


@pytest.fixture(scope="module")
def cores() -> Iterator[ProcessPoolExecutor]:
    """A world has one thread; each core simulates its own."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def simulate(seeds: range) -> Counter[str]:
    """Run worlds to their end; raises what one of them broke."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        dice = random.Random(seed)
        try:
            report = World(seed, length=dice.choice([5, 10, 14])).run(chaos=dice.choice([60, 150, 300]))
        except Exception as error:
            raise AssertionError(f"reproduce with World({seed}): {error}") from error
        totals.update({name: getattr(report, name) for name in NAMES})
    return totals


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_every_interleaving_settles_each_ordinal_once_and_makes_progress(
    first: int, cores: ProcessPoolExecutor
) -> None:
    last = min(first + PART, SEEDS)
    batches = [range(start, min(start + BATCH, last)) for start in range(first, last, BATCH)]
    totals: Counter[str] = sum(cores.map(simulate, batches), Counter())
    # The world would prove nothing if its faults did not happen.
    assert totals["incarnations"] > last - first
    assert min(totals[name] for name in ("rollouts_reused", "rollouts_regenerated", "steps_redone")) > 0


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

"""Evaluations of a simulated run: in some worlds, suites that fit beside training; due every second step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from gpu.rollout.control import RolloutControl
from gpu.rollout.evaluation import Suite, check_suites
from storage.errors import ConfigurationRefused

if TYPE_CHECKING:
    from tests.simulation.world import World

EVERY = 2


class Exams:
    """Draws from dice of its own."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._dice = random.Random(f"exams {seed}")
        wanted = [Suite(f"s{n}", self._dice.randint(1, 3), self._dice.randint(1, 2), 0.0) for n in range(2)]
        drawn = wanted[: self._dice.choice([1, 2])] if self._dice.random() < world.shape.exams else []
        self.suites = [suite for suite in drawn if self._fits(suite)]

    def _fits(self, suite: Suite) -> bool:
        try:
            check_suites(self._world.limits, [suite])
            return True
        except ConfigurationRefused:
            return False

    def due(self, control: RolloutControl) -> None:
        """A driver has brought the weights of a step to the engines."""
        step = control.ledger.step
        if step and step % EVERY == 0:
            self._world.tally["evaluations_begun"] += control.evaluations.due(step)

    def over(self, control: RolloutControl) -> bool:
        """Whether a run may end: everything due is recorded. Now and then nobody waits for that."""
        if control.ledger.due and self._dice.random() < 0.1:
            self._world.tally["evaluations_cut"] += len(control.ledger.due)
            control.evaluations.settle()
        return not control.ledger.due

    def check(self, evaluated: set[tuple[str, int]]) -> None:
        """At the end: each suite once for each step that was due in the life of the run."""
        steps = range(EVERY, self._world.control.ledger.step + 1, EVERY)
        wanted = {(suite.name, step) for suite in self.suites for step in steps}
        assert evaluated == wanted, "none forgotten, none twice"
        self._world.tally["evaluations"] += len(evaluated)

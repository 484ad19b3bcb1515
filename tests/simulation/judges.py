"""Group-level work of a simulated run: at once or outside, with verdicts in any order, and failures of the user's code;
and the recipe of its groups, which a redeployed environment changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from storage.ledger import Recipe

if TYPE_CHECKING:
    from gpu.rollout.control import RolloutControl
    from tests.simulation.world import World


class Judges:
    """Draws from dice of its own."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._dice = random.Random(f"judges {seed}")
        self.outside = self._dice.random() < 0.3
        self._recovery = self._dice.choice(["sibling", "sibling", "prompt_group"])
        self._changes = self._dice.random() < 0.3
        self._code = 0
        self._at_work: list[tuple[RolloutControl, int, str | None]] = []

    def recipe(self) -> Recipe:
        """What the next incarnation declares."""
        if self._changes and self._world.faults and self._dice.random() < 0.5:
            self._code += 1
            self._world.tally["recipes_changed"] += 1
        return Recipe(self._recovery, f"code {self._code}")

    def verdict(self, rewards: Sequence[float]) -> str:
        """Raises now and then."""
        if self._world.faults and self._dice.random() < 0.1:
            self._world.tally["filters_raised"] += 1
            raise RuntimeError("no judge")
        return self._world.filter(rewards)

    def work(self) -> bool:
        """Begin what may begin; one verdict comes in, perhaps for a manager that is gone."""
        control = self._world.control
        for ordinal, rewards in control.results.begin_judging():
            try:
                self._at_work.append((control, ordinal, self.verdict(rewards)))
            except RuntimeError:
                self._at_work.append((control, ordinal, None))
        if not self._at_work:
            return False
        owner, ordinal, reason = self._at_work.pop(self._dice.randrange(len(self._at_work)))
        if owner is not control:
            return True
        self._world.tally["judged_outside"] += 1
        if reason is None:
            owner.results.judging_failed(ordinal, RuntimeError("no judge"))
        else:
            owner.results.judge(ordinal, reason)
        return True

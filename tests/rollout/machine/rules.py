"""Rollout control as a state machine for hypothesis: any sequence of calls, by workers, engines, the driver and time.

A call knows only what its caller knows. After each the records that were written are judged by `Oracle`, and every view
that the control offers must show the oracle's picture.
"""

from __future__ import annotations

import random
import sys
from dataclasses import fields, replace
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpu.rollout.evaluation import Suite
from gpu.rollout.limits import Limits, Order, Submission, check_limits
from gpu.rollout.plain import plain_share
from gpu.rollout.results import keep_all, zero_variance
from storage.journal import fold
from storage.ledger import Recipe
from storage.retention import Retention
from storage.verify import verify
from tests.rollout.building import RUN, Bench, limits
from tests.rollout.machine.actions import TOPOLOGY, Actions
from tests.rollout.machine.driver import Driver
from tests.rollout.machine.workers import WORKERS
from tests.rollout.machine.world import TALLY

WEIGHTS = {
    "wait": 3, "take": 8, "seal": 10, "turn": 4, "act": 16, "fail": 4, "lose_a_worker": 3, "come_late": 3,
    "break_a_rule": 1, "act_wrongly": 4, "seal_with_an_open_request": 1, "discard_wrongly": 2,
    "acknowledge": 4, "end_plain": 4, "begin_judging": 4, "judge": 5, "evaluate": 2,
    "flush": 8, "freeze": 2, "land": 2, "crash": 1, "lower_the_bound": 1,
    "lease": 6, "commit": 8, "roll_back": 2, "commit_again": 1, "settle_what_is_not_open": 1, "redo": 1,
    "checkpoint": 4, "delete_retired": 2, "activate": 4, "lose_the_engines": 1, "acquire": 2, "renew": 1, "release": 3,
    "lose_a_driver": 1, "go_well": 4, "release_from_quarantine": 1, "change_the_configuration": 1,
    "archive": 2, "finish": 1,
}  # fmt: skip
"""How often each call is made. As rules of their own they would be switched off by halves in each example, and hardly
any example would get as far as a trained step."""
INSTEAD = {
    "roll_back": "lease", "commit": "lease", "lease": "flush", "flush": "seal", "turn": "take", "fail": "take",
    "break_a_rule": "take", "seal": "take", "lose_a_worker": "take", "take": "activate", "activate": "release",
    "acknowledge": "flush", "act": "take", "act_wrongly": "act", "seal_with_an_open_request": "act",
    "end_plain": "evaluate", "judge": "begin_judging",
}  # fmt: skip
"""A call for which there is no occasion gives way to what it waits for."""
CALLS = [call for call, weight in WEIGHTS.items() for _ in range(weight)]
FAULTS = [call for call, weight in WEIGHTS.items() if weight < 4]
"""What an example may do without."""


class Drawn(NamedTuple):
    """What an example is about. `filtered`: groups of equal rewards are discarded; `outside`: verdicts are worked out
    beside the control; `whole`: a group is redone whole when it loses an attempt."""

    limits: Limits
    length: int | None
    filtered: bool
    outside: bool
    whole: bool
    suites: tuple[Suite, ...]


@st.composite
def worlds(draw: st.DrawFn) -> Drawn:
    """Numbers that are not refused."""
    n, batch, backoff = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    submission = draw(st.sampled_from(Submission))
    completed = batch + backoff + draw(st.integers(0, 2))
    made = limits(
        num_siblings=n, batch=batch, staleness=draw(st.sampled_from([0, 1, 2, None])), submission=submission,
        order=draw(st.sampled_from(Order)), max_backoff=backoff, max_completed=completed,
        max_executing=(n if submission is Submission.SAMPLE else 1) + draw(st.integers(0, 6)),
        max_retained=completed + draw(st.integers(0, 1)), eviction_cap=draw(st.sampled_from([None, None, batch])),
        max_attempts=draw(st.integers(1, 3)), max_losses=draw(st.integers(1, 3)), undurable_age_s=10.0,
        max_hot_bytes=draw(st.sampled_from([4096, 1 << 20])), discard_end_of_source=draw(st.booleans()),
        max_postprocessing=draw(st.integers(1, 2)),
    )  # fmt: skip
    check_limits(made)
    suites = (Suite("suite", tasks=2, samples=1, threshold=0.0),) if plain_share(made) else ()
    length = draw(st.sampled_from([None, 3, 10]))
    return Drawn(made, length, n > 1 and draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), suites)


class Machine(Actions, Driver, RuleBasedStateMachine):
    """`without` are calls that an example does not make."""

    @initialize(world=worlds(), without=st.frozensets(st.sampled_from(FAULTS)))
    def begin(self, world: Drawn, without: frozenset[str]) -> None:
        self.length, self.without = world.length, without
        values = {field.name: getattr(world.limits, field.name) for field in fields(world.limits)}
        judge = zero_variance if world.filtered else keep_all
        retention = Retention(last=1, every=2, payload="keep", pin_s=60.0)
        bench = Bench(
            length=self.length,
            group_filter=judge,
            suites=world.suites,
            retention=retention,
            topology=TOPOLOGY,
            **values,
        )
        if world.outside:
            bench.judge_outside()
        if world.whole:
            bench.control.declare(Recipe("prompt_group", "old"))
        self.open(bench)

    @rule(call=st.sampled_from(CALLS), dice=st.integers(0, 9999))
    def call(self, call: str, dice: int) -> None:
        rng = random.Random(dice)
        if call in self.without:
            return
        while getattr(self, call)(rng) is False and call in INSTEAD:
            call = INSTEAD[call]
        self.follow()
        TALLY[f"call {call}"] += 1

    # ------------------------------------------------------------------ death

    def crash(self, rng: random.Random) -> None:
        """What is not stored is gone; a segment under way is stored or not."""
        self._forget(rng, list(WORKERS))
        if rng.random() < 0.5:
            self.bench.freeze()
        if rng.random() < 0.5:
            self.bench.land(confirmed=False)
        self.bench.restart()
        self.begin_again()
        recipe = Recipe(rng.choice(["sibling", "prompt_group"]), rng.choice(["old", "new"]))
        given_up = self.oracle.tally["continuation_discarded"]
        self.control.declare(recipe if rng.random() < 0.3 else self.control.ledger.recipe)
        self.follow()
        TALLY["given up at a claim"] += self.oracle.tally["continuation_discarded"] - given_up
        if rng.random() < 0.3:
            self.revert(rng)
        if rng.random() < 0.8:
            self.activate(rng)

    def lower_the_bound(self, rng: random.Random) -> None:
        """The run is resumed with a tighter staleness bound: what was within the old one starts again."""
        if self.limits.staleness != 0 and rng.random() < 0.5:
            self.bench.limits = replace(self.limits, staleness=0)
            self.bench.flush()
            self.crash(rng)

    # ------------------------------------------------------------------ the end of an example

    def teardown(self) -> None:
        if sys.exc_info()[0] is None and hasattr(self, "oracle"):
            self.conclude()

    def conclude(self) -> None:
        """From whatever state: without further faults the run comes to its end, and storage proves it."""
        rng = random.Random(0)
        self.bench.flush()
        self.crash(rng)
        self.activate(rng)
        goal = self.oracle.step + 2
        for _ in range(60):
            if self.oracle.finished or (self.length is None and self.oracle.step >= goal):
                break
            self.go_well(rng)
            if self.oracle.frontier == self.length and not self.oracle.groups:
                assert self.control.try_lease() is None
                break
        else:
            raise AssertionError(f"no progress: {self.control.status()}")
        self._finish()
        self.bench.flush()
        report = verify(self.bench.store, RUN)
        assert report.sound, report.problems
        assert (report.lost, report.unsettled, report.trained_twice) == (0, 0, 0)
        folded, _ = fold(self.bench.store, RUN, self.limits.num_siblings)
        self.oracle.compare(folded)
        TALLY["examples"] += 1

    def go_well(self, rng: random.Random) -> None:
        """Whoever can do something does it, and nothing fails."""
        self._wait(40.0)
        self._take("a", 100)
        self._seal(self._of("a"), rng)
        while self.end_plain(rng):
            pass
        for _ in range(3):
            self.begin_judging(rng)
            while self.judge(rng):
                pass
            self._wait(40.0)
        self.flush(rng)
        self.lease(rng)
        self.commit(rng)
        self.flush(rng)
        self.activate(rng)

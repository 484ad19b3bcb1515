"""Evaluations beside training: each (suite, step) that is due is measured once and recorded once.

An evaluation is a plain source; it holds nothing of training but its share of E. What is due is in the ledger, so the
next incarnation runs it again, with the weights that are served then. Its result is `mixed` when another version than
that of its step generated a token of it. Evaluations know nothing of each other: each ends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpu.rollout.books import Books
from gpu.rollout.limits import Limits, Submission
from gpu.rollout.messages import PlainTask
from gpu.rollout.plain import Plain, PlainGroup, PlainSource, plain_share
from gpu.rollout.scores import scores
from storage import schema
from storage.errors import ConfigurationRefused
from storage.ledger import UNKNOWN_VERSION, Policy


class Suite(msgspec.Struct, frozen=True):
    """What is measured: the first `tasks` tasks, `samples` rollouts each; one succeeds above the reward `threshold`."""

    name: str
    tasks: int
    samples: int
    threshold: float


class _Evaluation:
    """One (suite, step) under way. `digest` is of the weights served when it began, "" until any are."""

    def __init__(self, suite: Suite, step: int, digest: str, capacity: int) -> None:
        self.suite, self.step, self.digest = suite, step, digest
        tasks = (PlainTask(suite.name, index) for index in range(suite.tasks))
        self.source = PlainSource(tasks, suite.samples, capacity, finite=True)
        self.versions = (UNKNOWN_VERSION, UNKNOWN_VERSION)
        self._rewards: list[list[float]] = []
        self._finished = self._tokens = 0

    @property
    def mixed(self) -> bool:
        return self._finished > 0 and self.versions != (self.step, self.step)

    @property
    def groups(self) -> int:
        return len(self._rewards)

    def add(self, group: PlainGroup) -> None:
        found = [sample for sample in group.samples if sample is not None]
        self._rewards.append([sample.reward for sample in found])
        for sample in found:
            oldest, newest = self.versions if self._finished else (sample.oldest, sample.newest)
            self.versions = min(oldest, sample.oldest), max(newest, sample.newest)
            self._finished += 1
            self._tokens += sample.tokens

    def result(self) -> schema.EvaluationDone:
        """With everything that has no reward counted as failed."""
        suite = self.suite
        metrics = scores(self._rewards, suite.samples, suite.threshold)
        if self._finished:
            metrics["tokens_mean"] = self._tokens / self._finished
        samples = suite.tasks * suite.samples
        return schema.EvaluationDone(
            suite.name,
            self.step,
            self.digest,
            self.mixed,
            *self.versions,
            suite.tasks,
            samples,
            samples - self._finished,
            metrics,
        )


class Evaluations:
    """`newest` is the last result of each suite in this incarnation."""

    def __init__(self, books: Books, limits: Limits, plain: Plain, suites: Sequence[Suite]) -> None:
        self._books, self._plain, self._capacity = books, plain, limits.max_executing
        self._suites = {suite.name: suite for suite in suites}
        self._served: Policy | None = None
        self._running: list[_Evaluation] = []
        self.newest: dict[str, schema.EvaluationDone] = {}
        for suite, step in list(books.ledger.due):
            self._begin(suite, step)

    # ------------------------------------------------------------------ begin

    def due(self, step: int) -> int:
        """The weights after `step`, the last committed one, are to be evaluated. Idempotent; the number begun."""
        ledger = self._books.ledger
        known = ledger.due.keys() | ledger.evaluated
        names = [name for name in self._suites if (name, step) not in known]
        if names:
            self._books.record(schema.EvaluationDue(step, tuple(names)))
        for name in names:
            self._begin(name, step)
        return len(names)

    def _begin(self, name: str, step: int) -> None:
        suite = self._suites.get(name)
        if suite is None:  # due in an earlier incarnation, and no longer in the configuration
            weights, none = self._books.ledger.weights_digest, UNKNOWN_VERSION
            self._record(schema.EvaluationDone(name, step, weights, False, none, none, 0, 0, 0, {}))
            return
        digest = self._served.digest if self._served else ""
        one = _Evaluation(suite, step, digest, self._capacity)
        self._running.append(one)
        self._plain.open(one.source)

    def serve(self, policy: Policy) -> None:
        """Engines serve this version: what had to wait for one begins with it."""
        self._served = policy
        for one in self._running:
            one.digest = one.digest or policy.digest

    # ------------------------------------------------------------------ end

    def collect(self) -> None:
        """Take what has finished; record the evaluations that are complete."""
        for one in list(self._running):
            while (group := one.source.pop()) is not None:
                one.add(group)
            if one.source.exhausted:
                self._finish(one)

    def settle(self) -> None:
        """End every evaluation as it is: samples that have not finished count as failed. Idempotent."""
        self.collect()
        for one in list(self._running):
            for group in self._plain.close(one.source):
                one.add(group)
            one.digest = one.digest or self._books.ledger.weights_digest
            self._finish(one)

    def revert(self, to_step: int) -> None:
        """The weights after later steps are gone; when such a step is committed again, so are its evaluations due."""
        for one in [one for one in self._running if one.step > to_step]:
            self._plain.close(one.source)
            self._running.remove(one)
        self.newest = {suite: done for suite, done in self.newest.items() if done.step <= to_step}

    def _finish(self, one: _Evaluation) -> None:
        self._plain.close(one.source)
        self._running.remove(one)
        self._record(one.result())

    def _record(self, done: schema.EvaluationDone) -> None:
        self._books.record(done)
        self.newest[done.suite] = done

    # ------------------------------------------------------------------ views

    def delaying(self, version: int | None) -> list[str]:
        """Evaluations that wait for nothing but their own rollouts and that activating `version` would make mixed; all
        that run for None."""
        served = self._served.number if self._served else UNKNOWN_VERSION
        return [
            f"{one.suite.name} at step {one.step}"
            for one in self._running
            if version is None or (served != version and one.step == served and not one.mixed)
        ]

    def status(self) -> list[dict[str, object]]:
        return [
            {
                "suite": one.suite.name,
                "step": one.step,
                "finished": f"{one.groups} of {one.suite.tasks} tasks",
                "running_tasks": one.source.running,
                "mixed": one.mixed,
            }
            for one in self._running
        ]


def check_suites(limits: Limits, suites: Sequence[Suite]) -> None:
    """Refuse a suite whose task never fits into the share of E that evaluations have. Raises `ConfigurationRefused`."""
    share = plain_share(limits)
    for suite in suites:
        cost = suite.samples if limits.submission is Submission.SAMPLE else 1
        if cost > share:
            raise ConfigurationRefused(
                f"a task of suite {suite.name!r} needs {cost} of executing (E) = {limits.max_executing}, of which"
                f" evaluations have {share}: half, and less where a training group of {limits.num_siblings} would not"
                " fit beside them",
                expected=f"a share of at least {cost}",
                action="lower the suite's samples, or raise rollout.executing",
                code="deadlock",
            )

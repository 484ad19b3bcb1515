"""An RL pipeline in virtual time around the real rollout control: engines and trainer are events, control is not.

Engines have a number of slots; a slot generates one rollout at a constant speed. The trainer takes a fixed time per
step, an update stalls every slot and the trainer for a fixed time. Who runs when, what may be leased and what is stale
is decided by `RolloutControl` alone, with a real journal whose slots are confirmed in memory. Nothing sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu.rollout.control import RolloutControl
from gpu.rollout.limits import Limits, Order, Submission, check_limits
from gpu.rollout.messages import Dispatch, Ended, Grant, Identity, Outcome, Report
from storage.clock import VirtualClock
from storage.journal import JournalWriter, claim
from storage.memory import MemoryStore
from storage.runs import create_run, make_run

RUN, WORKER = "virtual", "w"
BACKOFF = 8
FLUSH_S, FLUSH_BYTES = 5.0, 4 << 20


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of a training step and of an update; tokens per second of one slot, and the number of slots."""

    train_s: float
    update_s: float
    tokens_per_s: float
    slots: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run did: `trained` ordinals in order, for each the versions between its oldest token and its training,
    tokens generated in all attempts, and what the ledger counted."""

    seconds: float
    trained: list[int]
    staleness: list[int]
    generated_tokens: int
    counts: Counter[str]


def bench_limits(
    siblings: int,
    batch: int,
    submission: Submission,
    *,
    staleness: int | None,
    executing: int,
    completed: int,
    backoff: int,
) -> Limits:
    """`executing`, `completed` and `backoff` are groups; the sample policy counts `executing` in rollouts."""
    return Limits(
        num_siblings=siblings,
        batch=batch,
        staleness=staleness,
        submission=submission,
        order=Order.FIFO,
        max_executing=executing * siblings if submission is Submission.SAMPLE else executing,
        max_retained=completed,
        max_completed=completed,
        max_hot_bytes=64 << 20,
        eviction_cap=None,
        prefetch=0,
        max_backoff=backoff,
        max_postprocessing=64,
        max_attempts=5,
        max_losses=20,
        backoff_base_s=0.5,
        backoff_max_s=60.0,
        undurable_age_s=30.0,
        undurable_bytes=64 << 20,
        discard_end_of_source=False,
    )


def limits_for(staleness: int | None, *, batch: int, siblings: int, slots: int, submission: Submission) -> Limits:
    """What a user would set: E fills the slots; P and R hold what the bound admits, or without a bound what executes
    and one batch, and the groups in backoff. Raises `ConfigurationRefused`."""
    executing = slots // siblings
    completed = BACKOFF + (executing + batch if staleness is None else batch * (staleness + 1))
    limits = bench_limits(
        siblings, batch, submission, staleness=staleness, executing=executing, completed=completed, backoff=BACKOFF
    )
    check_limits(limits)
    return limits


def generation_s(tokens: Sequence[Sequence[int]], submission: Submission, tokens_per_s: float, slots: int) -> float:
    """Seconds of a group when every slot is busy. Under the group policy a group keeps all its slots until its slowest
    rollout ends."""
    whole = submission is Submission.GROUP
    slot_tokens = statistics.fmean(len(group) * max(group) if whole else sum(group) for group in tokens)
    return slot_tokens / tokens_per_s / slots


def longest_shares(tokens: Sequence[Sequence[int]], trained: Sequence[int]) -> tuple[float, float]:
    """Share of the longest 5 % of prompts in the first 60 % of the source, and in the first 60 % that were trained."""
    first = max(1, len(tokens) * 3 // 5)
    by_length = sorted(range(len(tokens)), key=lambda ordinal: -max(tokens[ordinal]))
    longest = set(by_length[: max(1, len(tokens) // 20)])
    return (
        sum(ordinal in longest for ordinal in range(first)) / first,
        sum(ordinal in longest for ordinal in trained[:first]) / first,
    )


class Pipeline:
    """One run over a finite source: group g consists of rollouts of `tokens[g]` generated tokens.

    `drain`: an update waits for everything that executes; otherwise the weights change under it."""

    def __init__(self, tokens: Sequence[Sequence[int]], limits: Limits, speeds: Speeds, *, drain: bool = False) -> None:
        self._tokens, self._speeds, self._drain = tokens, speeds, drain
        self._clock = VirtualClock()
        store, siblings = MemoryStore(), limits.num_siblings
        create_run(store, make_run(run=RUN, created=0.0, num_siblings=siblings, staleness=limits.staleness,
                                   fingerprints={}, settings={}))  # fmt: skip
        claimed = claim(store, RUN, siblings, owner="", writer=WORKER, reason="start", clock=self._clock)
        self._journal = JournalWriter(RUN, claimed.incarnation, WORKER, claimed.tail, self._clock)
        self.control = RolloutControl(claimed.ledger, self._journal, limits, self._clock, length=len(tokens))
        self._running: list[tuple[float, int, Identity]] = []
        self._started = itertools.count()
        self._serving = 0
        self._first_version: dict[tuple[int, int], int] = {}
        self._news = False
        self._generated = 0
        self._trained: list[int] = []
        self._staleness: list[int] = []

    def run(self) -> Ran:
        """Until every group of the source is trained. Raises `RuntimeError` when nothing can happen any more."""
        self._activate()
        driver = self._drive()
        wake: float | None = -math.inf
        while (wake := self._step(driver, wake)) is not None:
            pass
        self.control.check_conservation()
        return Ran(self._now, self._trained, self._staleness, self._generated, self.control.ledger.counts)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()

    def _step(self, driver: Iterator[float], wake: float) -> float | None:
        """Let the driver go on if its time or news have come, else let the next rollout end. Returns when the driver
        wants to go on (infinity: at the next news), None at the end of the run."""
        if wake <= self._now or (wake == math.inf and self._news):
            self._news = False
            self._flush()
            wake_next = next(driver, None)
            self._take()
            return wake_next
        ends = self._running[0][0] if self._running else math.inf
        if wake == ends == math.inf:
            raise RuntimeError(f"nothing can happen: {self.control.status()}")
        self._clock.advance(min(wake, ends) - self._now)
        if self._journal.due(FLUSH_S, FLUSH_BYTES):
            self._flush()
        if ends < wake:
            self._finish(heapq.heappop(self._running)[-1])
            self._take()
        return wake

    # ------------------------------------------------------------------ engines

    def _take(self) -> None:
        for dispatch in self.control.take(WORKER, self._speeds.slots - len(self._running)):
            self._start(dispatch)

    def _start(self, dispatch: Dispatch) -> None:
        one = dispatch.identity
        self._first_version[one.group, one.sibling] = self._serving
        seconds = self._tokens[one.group][one.sibling] / self._speeds.tokens_per_s
        heapq.heappush(self._running, (self._now + seconds, next(self._started), one))

    def _finish(self, one: Identity) -> None:
        tokens, oldest = self._tokens[one.group][one.sibling], self._first_version[one.group, one.sibling]
        self._generated += tokens
        ended = Ended(one, Outcome.SEALED, 0, tokens, oldest, 1.0)
        self.control.report(Report(WORKER, str(one), "", 0, None, (), (ended,)))
        self._news |= one.group in self.control.ledger.completed or not self._running

    def _stall(self, seconds: float) -> None:
        """No slot generates for a while: everything ends later."""
        self._running = [(ends + seconds, order, one) for ends, order, one in self._running]

    # ------------------------------------------------------------------ driver and trainer

    def _drive(self) -> Iterator[float]:
        """The training loop of the product: lease, train, commit, and update under a hold. Yields when it goes on."""
        while (found := self.control.try_lease()) is not None:
            if not isinstance(found, Grant):
                yield math.inf
                continue
            self._note(found)
            yield self._now + self._speeds.train_s
            step = found.lease.step
            self.control.leasing.commit(found.lease.lease, step, f"state-{step}", f"weights-{step}", {})
            yield from self._update()

    def _note(self, grant: Grant) -> None:
        """Staleness by what the engines remember, not by what control believes."""
        siblings = range(self.control.limits.num_siblings)
        for group in grant.lease.groups:
            oldest = min(self._first_version[group.ordinal, sibling] for sibling in siblings)
            self._trained.append(group.ordinal)
            self._staleness.append(grant.lease.version - oldest)

    def _update(self) -> Iterator[float]:
        seconds = self._speeds.update_s
        hold = self.control.acquire("driver", "update", 1, math.inf)
        # Under the hold nothing starts, so its frontier is what still runs and what is not durable yet.
        while self._drain and (self._running or self.control.admission.still_open(hold.hold)):
            yield math.inf
        self._stall(seconds)
        yield self._now + seconds
        self._activate()
        self.control.admission.release(hold.hold)

    def _activate(self) -> None:
        self.control.publish_policy(f"weights-{self.control.ledger.step}")
        self._flush()
        self._serving = self.control.ledger.step
        self.control.serve(self._serving)

    # ------------------------------------------------------------------ journal

    def _flush(self) -> None:
        """What was recorded is durable."""
        if self._journal.last_seq > self._journal.durable_seq:
            frozen = self._journal.freeze()
            self._journal.confirm(frozen)
            self.control.ledger.placed(frozen.slot, frozen.last)
            self.control.durable(frozen.last)

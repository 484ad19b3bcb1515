"""What others were found to lose, repeat or throw away, and what we do instead. Each test names the finding ("A1") it
answers; it would fail on the behaviour that was found."""

from __future__ import annotations

import asyncio
import heapq
import pickle
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from gpu.rollout.capabilities import Capabilities, check_trainable
from gpu.rollout.limits import Submission
from gpu.rollout.messages import Dispatch, Grant, Outcome
from storage.errors import ConfigurationRefused
from storage.restore import plan_restore
from storage.schema import Deleted
from tests.rollout.building import Bench, limits, ordinals
from tests.rollout.desk import Desk, soon

GROUPS = {"num_siblings": 1, "submission": Submission.GROUP, "max_backoff": 0}


def everything(bench: Bench) -> list[Dispatch]:
    """All attempts that may start now."""
    return bench.control.take("w", 10_000)


def play(bench: Bench, outcome: Callable[[Dispatch], Outcome | None], trained: list[int]) -> None:
    """Generate and train to the end of the source; `outcome` None seals. Adds to `trained`."""
    for _ in range(1000):
        for dispatch in everything(bench):
            found = outcome(dispatch)
            if found is None:
                bench.control.report(bench.report_of([dispatch]))
            else:
                bench.fail(dispatch, found)
        bench.flush()
        found = bench.control.try_lease()
        if found is None:
            return
        if bench.control.ledger.lease is not None:
            trained += bench.train()
        bench.clock.advance(1.0)
    raise AssertionError(f"no end: {bench.control.status()}")


@pytest.mark.parametrize(("executing", "batch"), [(4, 8), (16, 8), (64, 32), (64, 8)])
def test_no_finished_group_is_generated_again_when_the_trainer_is_the_bottleneck(executing: int, batch: int) -> None:
    """A1: with the completed slot taken at completion, 26 to 85 % of the finished groups found none and were thrown
    away. Ours takes it at dispatch."""
    places = 2 * batch
    bench = Bench(**GROUPS, batch=batch, staleness=None, max_executing=executing, max_completed=places,
                  max_retained=places)  # fmt: skip
    for _ in range(12):
        while taken := everything(bench):  # all generation ends long before the trainer is back
            assert {dispatch.identity.attempt for dispatch in taken} == {0}
            bench.seal(taken)
        bench.train()
    assert bench.counts("requeued_") == {}
    buffered = bench.control.ledger.state_counts()["completed"]
    assert bench.counts("rollouts_sealed") == {"": len(bench.control.ledger.consumed) + buffered}


@pytest.mark.parametrize("reservable", [False, True])
def test_whether_groups_are_owned_follows_from_what_the_source_says_and_is_refused_at_start(reservable: bool) -> None:
    """A3: owned mode was chosen when the source's class overrode a method; the default source overrode it only to
    refuse, and the first call of the run raised."""
    says = Capabilities(finite=True, reservable=reservable, resumable=True)
    if reservable:
        assert check_trainable(says, 8, 8, 8) == (8, 8, 8)
        return
    with pytest.raises(ConfigurationRefused, match="cannot reserve"):
        check_trainable(says, 8, 8, 8)
    with pytest.raises(ConfigurationRefused, match="cannot reserve"):
        check_trainable(says, None, None, None)


class LongTailed:
    """Groups that take a log-normal time (virtual seconds, at most 3) on 32 places, and a trainer that needs none."""

    def __init__(self) -> None:
        self.bench = Bench(**GROUPS, batch=8, staleness=4, max_executing=32, max_completed=40, max_retained=40)
        self.rng = random.Random(5)
        self.running: list[tuple[float, int, Dispatch]] = []
        self.open_at_updates = 0

    def one_ends(self) -> None:
        end, _, dispatch = heapq.heappop(self.running)
        self.bench.clock.advance(max(0.0, end - self.bench.clock.monotonic()))
        self.bench.seal([dispatch])

    def seconds(self, steps: int, *, hold: bool, drain: bool) -> float:
        bench, control = self.bench, self.bench.control
        while control.ledger.step < steps:
            for dispatch in everything(bench):
                end = bench.clock.monotonic() + min(3.0, 0.1 * self.rng.lognormvariate(0.0, 1.5))
                heapq.heappush(self.running, (end, dispatch.identity.group, dispatch))
            grant = control.try_lease()
            if not isinstance(grant, Grant):
                self.one_ends()
                continue
            step = grant.lease.step
            control.leasing.commit(grant.lease.lease, step, f"state-{step}", f"weights-{step}", {})
            bench.flush()
            held = control.acquire("driver", "update", 1, 1e6) if hold else None
            self.open_at_updates += len(self.running)
            while held and drain and control.admission.still_open(held.hold):
                self.one_ends()
            bench.activate()
            if held:
                control.admission.release(held.hold)
        return bench.clock.monotonic()


def test_an_update_waits_for_no_generation_and_wastes_none() -> None:
    """A2: each update waited for every running generation: 0.63 steps/s instead of 11.3, and 968 groups generated to
    train 200."""
    world, without_holds = LongTailed(), LongTailed()
    seconds = world.seconds(20, hold=True, drain=False)
    assert world.open_at_updates > 20 * 8, "generation goes on across the updates"
    assert seconds == without_holds.seconds(20, hold=False, drain=False)
    assert seconds * 2 < LongTailed().seconds(20, hold=True, drain=True), "waiting is what costs"
    ledger = world.bench.control.ledger
    assert world.bench.counts("requeued_") == world.bench.counts("abandoned_") == {}
    assert ledger.counts["rollouts_sealed"] == len(ledger.consumed) + ledger.state_counts()["completed"]


@pytest.mark.parametrize("staleness", [0, 1, None])
@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_hold_that_changes_no_version_throws_nothing_away(staleness: int | None, done: int) -> None:
    """A4: a checkpoint's hold in the middle of a drain threw away the groups that were claimed already, 11 generated
    for a batch of 8."""
    bench = Bench(batch=4, staleness=staleness, max_executing=8, max_completed=6, max_retained=6)
    taken = everything(bench)
    bench.seal(taken[: 2 * done])
    bench.waits()
    hold = bench.control.acquire("checkpoint", "capture", 1, 10.0)
    bench.control.prepare_checkpoint(hold.hold, hold.epoch)
    bench.control.admission.release(hold.hold)
    bench.seal(taken[2 * done : 8])
    assert bench.train() == (0, 1, 2, 3)
    assert bench.counts("rollouts_sealed") == {"": 8}
    assert bench.counts("requeued_") == bench.counts("discarded_") == {}


@pytest.mark.parametrize("submission", Submission)
def test_groups_in_slow_group_level_work_are_bounded_in_number_and_at_work(submission: Submission) -> None:
    """A6: credits came back with the last sample, so that 1,032 groups of a budget of 4 were in a slow group reward."""
    bench = Bench(staleness=None, submission=submission, max_executing=8, max_postprocessing=2)
    bench.judge_outside()
    begun: dict[int, tuple[float, ...]] = {}
    for _ in range(20):
        bench.seal(everything(bench))
        begun.update(bench.control.results.begin_judging())
    assert len(bench.control.results.judging) == bench.control.ledger.dispatched == 6, "the completed places"
    assert len(begun) == 2
    for ordinal in begun:
        bench.control.results.judge(ordinal, "")
    bench.flush()
    assert bench.train() == tuple(begun)
    assert everything(bench), "and two groups more"


@pytest.mark.parametrize("ready", [0, 1, 2])
async def test_a_cancelled_wait_for_a_batch_loses_none_of_its_groups(ready: int) -> None:
    """A7: a drain that was cancelled or failed lost the groups it had popped, 3 of 3."""
    async with Desk(batch=3, staleness=None).opened() as desk:
        dispatches = await desk.take(6)
        await desk.finish(dispatches[: 2 * ready])
        for _ in range(3):
            waiting = asyncio.create_task(desk.lease(10.0))
            await soon()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await desk.finish(dispatches[2 * ready :])
        assert ordinals(await desk.lease()) == (0, 1, 2)


async def test_a_batch_whose_reply_was_lost_is_handed_out_again(desk: Desk) -> None:
    """A7, at the last moment: the lease was issued, and nobody learned of it."""
    waiting = asyncio.create_task(desk.lease(10.0))
    await desk.finish(await desk.take(4))
    await asyncio.wait([waiting])
    again = await desk.lease()
    assert (again.lease.lease, ordinals(again)) == (1, (0, 1))


def test_every_aborted_prompt_is_trained_in_the_end() -> None:
    """A10: stale and aborted prompts were dropped for good; with a third of them, 34 % of the prompts were never
    trained."""
    bench, trained = Bench(length=30, staleness=None), []
    play(bench, lambda d: Outcome.ABORTED if d.identity.group % 3 == d.identity.attempt == 0 else None, trained)
    assert sorted(trained) == list(range(30))
    assert bench.counts("abandoned_") == {"aborted": 20}
    assert bench.counts("discarded_") == {}


def test_every_stale_prompt_is_trained_in_the_end() -> None:
    """A10 for staleness, which only a bound that was lowered since can produce here."""
    bench, trained = Bench(length=12, staleness=None, max_executing=100, max_completed=12, max_retained=12), []
    bench.seal(everything(bench))
    trained += bench.train()
    bench.limits = limits(staleness=0, max_executing=100, max_completed=12, max_retained=12)
    bench.restart()
    bench.activate()
    play(bench, lambda dispatch: None, trained)
    assert bench.counts("requeued_") == {"stale": 10}
    assert sorted(trained) == list(range(12))


async def test_a_rollout_that_fails_costs_its_own_attempt_and_nobody_elses(desk: Desk) -> None:
    """A11: one failing sample ended the worker, other generations ran on unowned, and every later call failed."""
    dispatches = await desk.take(8)
    await desk.finish(dispatches[:1], Outcome.FAILED)
    assert await desk.manager.condition() is None
    status = await desk.manager.status()
    assert (status["live"], status["fatal"]) == (7, "")
    await desk.finish(dispatches[1:])
    assert ordinals(await desk.lease()) == (1, 2)


def test_a_prompt_that_always_aborts_is_tried_ever_more_rarely_then_set_aside_and_others_go_on() -> None:
    """A12: such a group was retried 1,406 times in two seconds, each time first in line; a failure that repeats itself
    was fatal."""
    bench = Bench(length=20, staleness=None, max_attempts=4, backoff_base_s=1.0, backoff_max_s=60.0)
    tried: list[float] = []
    trained: list[int] = []

    def outcome(dispatch: Dispatch) -> Outcome | None:
        if dispatch.identity.group:
            return None
        if dispatch.identity.sibling == 0:
            tried.append(bench.clock.monotonic())
            assert dispatch.identity.attempt == len(tried) - 1
        return Outcome.ABORTED if dispatch.identity.sibling == 0 else None

    play(bench, outcome, trained)
    assert len(tried) == 4
    assert [round(later - earlier) for earlier, later in pairwise(tried)] == [1, 2, 4]
    assert (bench.place(0), sorted(trained)) == ("quarantined", list(range(1, 20)))


@pytest.mark.parametrize("crash", [False, True])
def test_a_rollout_whose_budget_is_spent_is_not_tried_again_while_its_siblings_finish(crash: bool) -> None:
    """A12, with a slow sibling, and with a crash that ends it: the group is set aside as soon as none is live."""
    bench = Bench(max_attempts=1, max_executing=2)
    failing, _ = bench.control.take("w", 2)
    bench.fail(failing)
    bench.flush()
    bench.clock.advance(100.0)
    if crash:
        bench.restart()
        bench.activate()
    assert [d for d in everything(bench) if (d.identity.group, d.identity.sibling) == (0, 0)] == []


def test_a_resume_skips_nothing_that_was_handed_out_and_least_of_all_the_long_ones() -> None:
    """A13: each resume forgot all groups that were handed out and not trained, four batches at the defaults; the long
    ones most of all."""
    bench = Bench(length=64, batch=8, staleness=None, num_siblings=1, max_executing=8, max_completed=16,
                  max_retained=16)  # fmt: skip
    trained: list[int] = []
    while bench.control.ledger.step < 4:
        bench.seal([dispatch for dispatch in everything(bench) if dispatch.identity.group % 9])
        if isinstance(bench.control.try_lease(), Grant):
            trained += bench.train()
    assert bench.control.ledger.frontier > len(trained)
    bench.restart()
    bench.activate()
    play(bench, lambda dispatch: None, trained)
    assert Counter(trained) == Counter(range(64))


def test_settled_groups_need_no_memory_whatever_the_number_of_steps() -> None:
    """A17: acknowledgements were kept until the next save."""
    bench = Bench(num_siblings=1, batch=2)
    sizes: list[int] = []
    for step in range(1, 201):
        bench.seal(everything(bench))
        bench.train()
        if step % 5 == 0:
            bench.control.publish_checkpoint(step, f"manifest-{step}", "digest", 1, 1)
            if gone := tuple(one.manifest for one in bench.control.ledger.retired):
                bench.control.books.record(Deleted(gone, ()))
        if step % 50 == 0:
            sizes.append(len(pickle.dumps(bench.control.ledger)))
            assert len(plan_restore(bench.control.ledger, "r").steps) <= 15, "what a redo needs"
    assert max(sizes) < 1.1 * min(sizes)
    assert len(bench.control.ledger.consumed) == 400


def test_a_filter_that_rejects_everything_never_fills_the_places() -> None:
    """A24: discarded groups kept their completed slots until somebody drained."""
    bench = Bench(group_filter=lambda rewards: "useless", staleness=0)
    for _ in range(50):
        taken = everything(bench)
        assert len(taken) == 4, "a whole batch is admitted again"
        bench.seal(taken)
    assert bench.counts("discarded_") == {"useless": 100}
    assert bench.control.ledger.retained == bench.control.ledger.dispatched == 0


@pytest.mark.parametrize("how", [Outcome.ABORTED, Outcome.FAILED, Outcome.ENGINE_LOST, Outcome.WORKER_LOST, "crash"])
def test_an_attempt_goes_on_after_the_turns_that_its_predecessor_finished(how: Outcome | str) -> None:
    """A26: a retry generated in full again."""
    bench = Bench(max_executing=2)
    first, _ = bench.control.take("w", 2)
    for turn in range(3):
        bench.control.report(bench.turn_of(first, turn, turn))
    bench.flush()
    if how == "crash":
        bench.restart()
        bench.activate()
    elif how is Outcome.WORKER_LOST:
        bench.control.lose_worker("w")
    elif isinstance(how, Outcome):
        bench.fail(first, how)
    bench.flush()
    bench.clock.advance(2.0)
    again = next(d for d in everything(bench) if (d.identity.group, d.identity.sibling) == (0, 0))
    assert again.identity.attempt == 1
    assert again.continuation is not None
    assert (again.continuation.at.turn, len(again.continuation.rows)) == (2, 3)

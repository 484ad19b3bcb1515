"""What others were found to wait for without end, or to leave shut after a failure, and what we do instead. Each test
names the finding ("A14") it answers; it would fail on the behaviour that was found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from gpu.rollout.drain import Drain, DrainAction, DrainPolicy
from gpu.rollout.evaluation import Suite
from gpu.rollout.messages import Outcome
from storage.clock import VirtualClock
from storage.errors import ArtifactCorrupt, DeadlineExceeded, EngineFailed, TidegateError
from storage.journal import claim
from storage.runs import RunPaths
from tests.rollout.building import RUN, Bench, ordinals
from tests.rollout.desk import Desk, soon, until

T = TypeVar("T")


async def within(seconds: float, call: Awaitable[T]) -> T:
    """The answer of a call that must not wait."""
    started = time.monotonic()
    answer = await asyncio.wait_for(call, 5.0)
    assert time.monotonic() - started < seconds
    return answer


# ---------------------------------------------------------------------- holds


async def test_the_first_of_two_holds_to_end_does_not_reopen_admission_under_the_second(desk: Desk) -> None:
    """A8: the pause was one event, so the first of two overlapping evaluations to end reopened the producer."""
    await desk.finish(await desk.take(8))
    first = await desk.manager.acquire(desk.caller, "evaluation 1", 60.0)
    second = await desk.manager.acquire(desk.caller, "evaluation 2", 60.0)
    await desk.manager.release(desk.caller, first.hold)
    assert await desk.take(timeout=0.05) == []
    with pytest.raises(DeadlineExceeded, match="evaluation 2"):
        await desk.manager.lease(desk.caller, 0.05)
    await desk.manager.release(desk.caller, second.hold)
    assert ordinals(await desk.lease()) == (0, 1)


def evaluating(*suites: Suite) -> Bench:
    """One committed step, all suites due, and room for everything."""
    bench = Bench(suites=suites, staleness=None, max_executing=32, max_completed=8, max_retained=8)
    bench.seal(bench.control.take("w", 100))
    bench.train()
    assert bench.control.evaluations.due(1) == len(suites)
    return bench


def test_overlapping_evaluations_pause_nobody_and_the_end_of_one_is_nothing_to_the_other() -> None:
    """A8 for evaluations themselves: they take executing capacity, no hold, so there is nothing to reopen."""
    bench = evaluating(Suite("a", 1, 1, 0.0), Suite("b", 1, 1, 0.0))
    taken = bench.control.take("w", 100)
    first, second = (dispatch for dispatch in taken if dispatch.plain)
    for step, ends in ((2, []), (3, [first]), (4, [second])):
        assert bench.control.admission.is_open
        bench.end_plain(ends)
        bench.seal([dispatch for dispatch in taken if not dispatch.plain])
        bench.train()
        assert bench.control.ledger.step == step
        taken = bench.control.take("w", 100)
    assert bench.control.ledger.evaluated == {("a", 1), ("b", 1)}


def test_what_ends_beside_an_evaluation_is_leased_at_once() -> None:
    """A9 for evaluations themselves: a batch that was finished within 0.2 s was handed out at the evaluation's end."""
    bench = evaluating(Suite("slow", 1, 1, 0.0))
    taken = bench.control.take("w", 100)
    assert any(dispatch.plain for dispatch in taken)
    bench.seal([dispatch for dispatch in taken if not dispatch.plain])
    assert ordinals(bench.grant()) == (2, 3)
    assert bench.control.plain.live == 1


async def test_what_ends_under_a_hold_is_in_the_buffer_when_it_ends(desk: Desk) -> None:
    """A9: the worker parked before it moved finished groups, so a drain waited for the end of the evaluation and then
    again for them."""
    dispatches = await desk.take(4)
    hold = await desk.manager.acquire(desk.caller, "evaluation", 60.0)
    waiting = asyncio.create_task(desk.lease(10.0))
    await desk.finish(dispatches)
    await soon()
    status = await desk.manager.status()
    assert status["groups"] == {"reserved": 0, "generating": 2, "completed": 2, "leased": 0}
    assert not waiting.done()
    await desk.manager.release(desk.caller, hold.hold)
    assert ordinals(await asyncio.wait_for(waiting, 2.0)) == (0, 1)


async def test_a_release_that_raised_can_be_repeated(desk: Desk) -> None:
    """A15: a release was one attempt; if it raised, admission stayed shut for the life of the process."""
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    await desk.manager.drain(desk.caller, hold, DrainPolicy(Drain.BOUNDARY, 1.0, DrainAction.FAIL))
    desk.engines.broken.append("resume")
    with pytest.raises(EngineFailed):
        await desk.manager.release(desk.caller, hold.hold)
    await desk.manager.release(desk.caller, hold.hold)
    assert not desk.engines.keeping_back
    assert len(await desk.take(8)) == 8


@pytest.mark.parametrize("way_out", ["repeat", "release", "silence", "another driver", "hook"])
async def test_an_update_that_failed_has_a_way_out(way_out: str) -> None:
    """A16: the hold stayed up, and no call was documented that ends it."""
    async with Desk().opened() as desk:
        await desk.finish(await desk.take(4))
        await desk.commit(await desk.lease())
        hold = await desk.manager.acquire(desk.caller, "update", 1.0 if way_out == "silence" else 60.0)
        policy = await desk.manager.publish_policy(desk.caller, "weights-1")
        desk.engines.broken.append("activate")
        with pytest.raises(EngineFailed):
            await desk.manager.activate(desk.caller, hold)
        if way_out == "repeat":
            assert await desk.manager.publish_policy(desk.caller, "weights-1") == policy
            await desk.manager.activate(desk.caller, hold)
        elif way_out == "silence":
            await until(lambda: desk.manager.control.admission.is_open)
        elif way_out == "another driver":
            desk.caller = (await desk.attach("flow")).caller
        elif way_out == "hook":
            assert await desk.manager.release_owner("flow") == [hold.hold]
        if way_out in ("repeat", "release"):
            await desk.manager.release(desk.caller, hold.hold)
        assert desk.manager.control.admission.is_open
        if way_out != "repeat":
            await desk.update(1)
        assert desk.engines.activated == [0, 1]
        assert {d.version for d in await desk.take()} == {0, 1}, "what was minted before, and what is new"


async def test_after_a_cancellation_later_attempts_run_as_ever(desk: Desk) -> None:
    """A18: the flag that a cancellation set was never cleared: every later group came back at once to be retried."""
    await desk.take()
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    drained = await desk.manager.drain(desk.caller, hold, DrainPolicy(Drain.FRONTIER, 0.02, DrainAction.CANCEL))
    assert drained.left == 8
    await desk.manager.release(desk.caller, hold.hold)
    fresh = await desk.take(timeout=3.0)
    await desk.finish(fresh)
    assert len(ordinals(await desk.lease())) == 2
    assert (await desk.manager.status())["live"] == 0


async def test_a_stuck_generation_blocks_neither_a_hold_nor_the_end(desk: Desk) -> None:
    """A25: neither holds nor close had a deadline."""
    (stuck,) = await desk.take(1)
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    frontier = DrainPolicy(Drain.FRONTIER, 0.05, DrainAction.FAIL)
    with pytest.raises(DeadlineExceeded, match=str(stuck.identity)):
        await within(2.0, desk.manager.drain(desk.caller, hold, frontier))
    await within(2.0, desk.manager.finish(desk.caller, "enough"))
    await desk.finish([stuck])
    status = await desk.manager.status()
    assert (status["finished"], status["live"], status["ignored"]) == ("enough", 0, {"sealed": 1})


# ---------------------------------------------------------------------- settlement and storage


@pytest.mark.parametrize("settle", ["commit", "roll_back"])
async def test_a_settlement_that_failed_can_be_repeated_and_then_a_checkpoint_and_the_end_are_possible(
    settle: str, desk: Desk
) -> None:
    """A14: after a failed commit or rollback every later save and dispose was refused for ever."""
    await desk.finish(await desk.take(4))
    grant = await desk.lease()

    async def settled() -> None:
        if settle == "commit":
            await desk.commit(grant)
        else:
            await desk.manager.roll_back(desk.caller, grant.lease.lease, "untouched")

    desk.store.down = True
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="no room"):
            await settled()
    desk.store.down = False
    await settled()
    hold = await desk.manager.acquire(desk.caller, "checkpoint", 60.0)
    await desk.manager.prepare_checkpoint(desk.caller, hold)
    await desk.manager.release(desk.caller, hold.hold)
    await desk.manager.finish(desk.caller, "enough")
    status = await desk.manager.status()
    assert (status["finished"], status["consumed"]) == ("enough", 2 if settle == "commit" else 0)


async def test_a_write_that_hangs_keeps_nobody_from_taking_and_reporting_work(desk: Desk) -> None:
    """A19: the source's lock was held during the write, and the next reservation blocked the event loop for it."""
    desk.store.answers.clear()
    taken = await desk.take(4)
    await desk.finish(taken[:2])
    await soon()
    more = await within(2.0, desk.take(8, timeout=60.0))
    assert len(more) == 4
    await within(2.0, desk.finish(taken[2:]))
    await within(2.0, desk.manager.status())
    desk.store.answers.set()
    assert ordinals(await desk.lease()) == (0, 1)


def test_a_part_of_the_journal_that_is_missing_is_refused_and_never_the_beginning_of_a_new_run() -> None:
    """A19: a missing checkpoint file silently restarted the run at prompt 0."""
    bench = Bench()
    bench.seal(bench.control.take("w", 4))
    bench.train()
    bench.store.delete([RunPaths(RUN).segment(0)])
    with pytest.raises(ArtifactCorrupt, match="is missing"):
        claim(bench.store, RUN, 2, owner="t", writer="late", reason="test", clock=VirtualClock())


SETTLEMENTS: dict[str, Callable[[Desk], Awaitable[object]]] = {
    "commit": lambda desk: desk.manager.commit(desk.caller, 1, 1, "state-1", "weights-1", {}),
    "roll_back": lambda desk: desk.manager.roll_back(desk.caller, 1, "untouched"),
}


@pytest.mark.parametrize("settle", SETTLEMENTS)
async def test_a_settlement_waits_with_a_deadline_while_storage_hangs(settle: str, desk: Desk) -> None:
    """A20: a settlement from another thread waited without limit for a loop that had stopped."""
    await desk.finish(await desk.take(4))
    await desk.lease()
    await soon()
    desk.store.answers.clear()
    with pytest.raises(DeadlineExceeded) as caught:
        await within(4.0, SETTLEMENTS[settle](desk))
    assert caught.value.code == "commit"
    desk.store.answers.set()
    await SETTLEMENTS[settle](desk)
    assert (await desk.manager.status())["open_lease"] is None


async def test_a_fatal_error_reaches_the_trainer_while_generations_run_or_hang(desk: Desk) -> None:
    """A29: it reached the trainer only when all unrelated generations had ended by themselves: after 4.4 s with a
    neighbour of 4 s, never with a stuck one, nor while the worker was parked in a pause or a full buffer."""
    stuck = await desk.take()
    await desk.finish(stuck[:1], Outcome.FAILED)
    await desk.manager.acquire(desk.caller, "update", 60.0)
    waiting = asyncio.create_task(desk.lease(60.0))
    await soon()
    desk.manager.fail(ValueError("the cause"))
    with pytest.raises(TidegateError, match="the cause"):
        await within(2.0, waiting)

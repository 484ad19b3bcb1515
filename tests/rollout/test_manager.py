"""The manager's waits: each ends with what it waited for, with its deadline and a reason, or with the first cause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gpu.rollout.drain import Drain, DrainAction, DrainPolicy
from gpu.rollout.manager import RolloutManager
from gpu.rollout.messages import Caller, Report
from storage.clock import SystemClock
from storage.errors import DeadlineExceeded, HoldRefused, RunBusy, RunFenced, TidegateError
from storage.journal import claim
from tests.rollout.building import RUN
from tests.rollout.desk import Desk, soon

# ---------------------------------------------------------------------- batches


async def test_a_lease_waits_for_a_durable_batch(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.manager.lease(desk.caller, 10.0))
    dispatches = await desk.take(4)
    await soon()
    assert not waiting.done()
    await desk.finish(dispatches)
    grant = await waiting
    assert grant is not None
    assert [group.ordinal for group in grant.lease.groups] == [0, 1]


async def test_a_lease_that_comes_too_late_says_what_was_missing_and_who_has_it(desk: Desk) -> None:
    with pytest.raises(DeadlineExceeded, match="no batch for step 1") as caught:
        await desk.manager.lease(desk.caller, 0.05)
    assert caught.value.code == "lease"
    assert "generation" in caught.value.expected


async def test_a_commit_is_repeated_until_the_store_is_back_and_says_meanwhile_why_it_waits(desk: Desk) -> None:
    await desk.finish(await desk.take(4))
    grant = await desk.manager.lease(desk.caller, 1.0)
    assert grant is not None

    async def commit() -> None:
        await desk.manager.commit(desk.caller, grant.lease.lease, 1, "state-1", "weights-1", {"loss": 1.0})

    desk.store.down = True
    with pytest.raises(DeadlineExceeded, match="no room") as caught:
        await commit()
    assert caught.value.code == "commit"
    status = await desk.manager.status()
    assert "no room" in status["journal"]["stalled"]  # type: ignore[index]
    desk.store.down = False
    await commit()
    assert (await desk.manager.status())["step"] == 1
    assert (await desk.manager.status())["journal"]["stalled"] == ""  # type: ignore[index]


async def test_a_rollback_keeps_the_batch(desk: Desk) -> None:
    await desk.finish(await desk.take(4))
    grant = await desk.manager.lease(desk.caller, 1.0)
    assert grant is not None
    await desk.manager.roll_back(desk.caller, grant.lease.lease, "diverged")
    again = await desk.manager.lease(desk.caller, 1.0)
    assert again is not None
    assert again.lease.lease != grant.lease.lease
    assert [g.ordinal for g in again.lease.groups] == [g.ordinal for g in grant.lease.groups]


# ---------------------------------------------------------------------- workers


async def test_a_worker_waits_for_work_and_gets_none_at_its_timeout(desk: Desk) -> None:
    assert await desk.take()
    assert await desk.take(timeout=0.02) == []


async def test_a_call_of_a_dead_worker_that_still_waits_gets_nothing(desk: Desk) -> None:
    """Work handed to a dead worker would be nobody's."""
    await desk.take()
    late = asyncio.create_task(desk.take(worker="dead", timeout=10.0))
    await soon()
    desk.manager.lose_worker("dead")
    with pytest.raises(RunFenced, match="dead"):
        await late
    assert desk.manager.lose_worker("w") == desk.manager.control.limits.max_executing
    taken = await desk.take(worker="w2")
    assert {d.identity.attempt for d in taken} == {1}


async def test_a_worker_of_an_older_incarnation_is_refused(desk: Desk) -> None:
    with pytest.raises(RunFenced):
        await desk.manager.take(desk.manager.incarnation - 1, "w", 1, 0.0)
    with pytest.raises(RunFenced):
        await desk.manager.report(desk.manager.incarnation - 1, Report("w", "", "", 0, None, (), ()))


# ---------------------------------------------------------------------- drivers

DRIVER_CALLS: dict[str, Callable[[RolloutManager, Caller], Awaitable[object]]] = {
    "lease": lambda m, c: m.lease(c, 1.0),
    "commit": lambda m, c: m.commit(c, 1, 1, "s", "w", {}),
    "roll_back": lambda m, c: m.roll_back(c, 1, "no"),
    "acquire": lambda m, c: m.acquire(c, "x", 1.0),
    "renew": lambda m, c: m.renew(c, 1, 1),
    "release": lambda m, c: m.release(c, 1),
    "publish_policy": lambda m, c: m.publish_policy(c, "d"),
    "publish_checkpoint": lambda m, c: m.publish_checkpoint(c, 1, "m", "d", 1, 1),
    "plan": lambda m, c: m.plan(c),
    "redone": lambda m, c: m.redone(c, 1, "s", "w"),
    "newest_checkpoint": lambda m, c: m.newest_checkpoint(c),
    "finish": lambda m, c: m.finish(c, "done"),
}


@pytest.mark.parametrize("call", DRIVER_CALLS)
async def test_an_older_driver_is_refused_and_changes_nothing(call: str, desk: Desk) -> None:
    old = desk.caller
    await desk.attach("flow")
    before = desk.manager.control.books.journal.last_seq
    with pytest.raises(RunFenced):
        await DRIVER_CALLS[call](desk.manager, old)
    with pytest.raises(RunFenced):
        await DRIVER_CALLS[call](desk.manager, Caller(old.incarnation + 1, old.token))
    assert desk.manager.control.books.journal.last_seq == before


async def test_a_new_attempt_waits_until_the_open_calls_of_the_old_one_ended(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.manager.lease(desk.caller, 30.0))
    await soon()
    attached = await desk.attach("flow")
    assert waiting.done()
    with pytest.raises(RunFenced):
        await waiting
    assert attached.caller.token == desk.caller.token + 1


async def test_holds_of_an_older_driver_end_with_it(desk: Desk) -> None:
    await desk.manager.acquire(desk.caller, "update", 60.0)
    assert not desk.manager.control.admission.is_open
    await desk.attach("flow")
    assert desk.manager.control.admission.is_open


async def test_another_flow_run_needs_to_say_that_it_takes_over(desk: Desk) -> None:
    with pytest.raises(RunBusy, match="flow"):
        await desk.attach("other")
    attached = await desk.attach("other", take_over=True)
    assert attached.replaced == "flow"


# ---------------------------------------------------------------------- the end


async def test_a_fatal_error_reaches_every_waiter_at_once_with_the_first_cause(desk: Desk) -> None:
    await desk.take()
    desk.store.down = True
    waiters = [
        asyncio.create_task(desk.manager.lease(desk.caller, 60.0)),
        asyncio.create_task(desk.take(worker="v", timeout=60.0)),
    ]
    await soon()
    desk.manager.fail(ValueError("the first cause"))
    desk.manager.fail(ValueError("a later one"))
    for outcome in await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 2.0):
        assert isinstance(outcome, TidegateError)
        assert "the first cause" in outcome.found
    with pytest.raises(TidegateError, match="the first cause"):
        await desk.attach("flow")
    condition = await desk.manager.condition()
    assert condition is not None
    assert "the first cause" in condition.found


async def test_a_manager_that_is_fenced_by_a_newer_one_ends_and_tells_its_waiters(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.manager.lease(desk.caller, 60.0))
    await soon()
    claim(desk.store, RUN, 2, owner="second", writer="other", reason="test", clock=SystemClock())
    await desk.finish(await desk.take(2))
    with pytest.raises(RunFenced):
        await asyncio.wait_for(waiting, 5.0)
    assert isinstance(await desk.manager.condition(), RunFenced)


# ---------------------------------------------------------------------- drains


async def frontier(desk: Desk, action: DrainAction, deadline: float) -> int:
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    drained = await desk.manager.drain(desk.caller, hold, DrainPolicy(Drain.FRONTIER, deadline, action))
    return drained.left


async def test_the_frontier_drains_when_its_executions_are_published(desk: Desk) -> None:
    dispatches = await desk.take(4)
    draining = asyncio.create_task(frontier(desk, DrainAction.FAIL, 10.0))
    await soon()
    assert not draining.done()
    await desk.finish(dispatches[:2])
    await soon()
    assert not draining.done()
    await desk.finish(await desk.take(100, timeout=0.0) + dispatches[2:])
    assert await draining == 0


async def test_at_the_deadline_of_a_frontier_the_update_proceeds_cancels_or_fails(desk: Desk) -> None:
    await desk.take()
    live = desk.manager.control.ledger.live
    assert await frontier(desk, DrainAction.PROCEED, 0.02) == live
    with pytest.raises(DeadlineExceeded, match=r"g0/0~0@1") as caught:
        await frontier(desk, DrainAction.FAIL, 0.02)
    assert caught.value.code == "drain"
    assert await frontier(desk, DrainAction.CANCEL, 0.02) == live
    assert desk.manager.control.ledger.live == 0


async def test_at_the_deadline_of_a_boundary_the_update_proceeds_cancels_or_fails(desk: Desk) -> None:
    desk.engines.paused.clear()
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)

    async def drain(action: DrainAction) -> int:
        policy = DrainPolicy(Drain.BOUNDARY, 0.02, action)
        return (await desk.manager.drain(desk.caller, hold, policy)).left

    assert await drain(DrainAction.PROCEED) == 1
    assert await drain(DrainAction.CANCEL) == 3
    assert desk.engines.cancelled == 1
    with pytest.raises(DeadlineExceeded, match="did not end"):
        await drain(DrainAction.FAIL)


async def test_an_update_under_a_hold_that_expired_is_refused(desk: Desk) -> None:
    hold = await desk.manager.acquire(desk.caller, "update", 0.05)
    await asyncio.sleep(0.3)
    assert desk.manager.control.admission.is_open, "a silent owner does not keep admission closed"
    for effect in (
        desk.manager.activate(desk.caller, hold),
        desk.manager.prepare_checkpoint(desk.caller, hold),
        desk.manager.drain(desk.caller, hold, DrainPolicy(Drain.NONE, 1.0, DrainAction.PROCEED)),
    ):
        with pytest.raises(HoldRefused):
            await effect
    await desk.manager.release(desk.caller, hold.hold)  # late, and harmless


async def test_a_hook_releases_what_a_dead_driver_held_and_nobody_elses(desk: Desk) -> None:
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    assert await desk.manager.release_owner("another flow run") == []
    assert await desk.manager.release_owner("flow") == [hold.hold]
    assert desk.manager.control.admission.is_open

"""Adversarial scenarios of holds, updates, checkpoints, and of closing or failing at any moment.

Numbers ("43.") are those of the project's list of scenarios; see `test_scenarios` and
`test_scenarios_of_batches`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import permutations

import pytest

from gpu.rollout.drain import Drain, DrainAction, DrainPolicy
from gpu.rollout.messages import Dispatch, Outcome, Wait
from storage.errors import DeadlineExceeded, EngineFailed, LeaseRefused, TidegateError
from storage.verify import verify
from tests.rollout.building import RUN, Bench
from tests.rollout.desk import Desk, soon, until

CANCEL = DrainPolicy(Drain.FRONTIER, 0.02, DrainAction.CANCEL)
IN_FLIGHT = DrainPolicy(Drain.BOUNDARY, 1.0, DrainAction.FAIL)


def everything(bench: Bench) -> list[Dispatch]:
    return bench.control.take("w", 1000)


# ---------------------------------------------------------------------- cancellation


async def test_an_attempt_that_ignores_its_cancellation_settles_nothing_when_it_ends_at_last(desk: Desk) -> None:
    """13. Ownership is kept, the late end is counted, and the retry trains."""
    stubborn = await desk.take(4)
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    assert (await desk.manager.drain(desk.caller, hold, CANCEL)).left == 8
    await desk.manager.release(desk.caller, hold.hold)
    retried = await desk.take(timeout=3.0)
    await desk.finish(stubborn)
    assert (await desk.manager.status())["ignored"] == {"sealed": 4}
    await desk.finish(retried)
    await desk.commit(await desk.lease())
    assert (await desk.manager.status())["consumed"] == 2


@pytest.mark.parametrize("moment", ["queued", "running", "between turns", "one sibling sealed", "sealed, not durable"])
async def test_a_cancellation_at_any_moment_ends_what_runs_and_keeps_what_is_finished(moment: str) -> None:
    """14. Before the start, during it, between samples, after the last one, during publication."""
    async with Desk(length=1, batch=1, max_executing=2, backoff_base_s=0.01).opened() as desk:
        taken = await desk.take(1 if moment == "queued" else 2)
        if moment == "between turns":
            await desk.turn(taken[0])
        elif moment == "one sibling sealed":
            await desk.finish(taken[:1])
        elif moment == "sealed, not durable":
            desk.store.answers.clear()
            await desk.finish(taken)
        hold = await desk.manager.acquire(desk.caller, "update", 60.0)
        await desk.manager.drain(desk.caller, hold, CANCEL)
        assert (await desk.manager.status())["live"] == 0
        desk.store.answers.set()
        await desk.manager.release(desk.caller, hold.hold)
        again = await desk.take(timeout=0.5)
        assert {(dispatch.identity.sibling, dispatch.identity.attempt) for dispatch in again} == {
            "one sibling sealed": {(1, 1)}, "sealed, not durable": set()}.get(moment, {(0, 1), (1, 1)})  # fmt: skip
        assert [dispatch.identity.sibling for dispatch in again if dispatch.continuation] == (
            [0] if moment == "between turns" else []
        )
        await desk.finish(again)
        assert (await desk.lease()).lease.groups[0].ordinal == 0


async def test_a_waiter_that_is_cancelled_ten_times_ends_nothing_by_it(desk: Desk) -> None:
    """15. The frontier ends when its executions end, once."""
    dispatches = await desk.take()
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    patient = DrainPolicy(Drain.FRONTIER, 10.0, DrainAction.FAIL)
    for _ in range(10):
        waiter = asyncio.create_task(desk.manager.drain(desk.caller, hold, patient))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    assert (await desk.manager.status())["live"] == len(desk.manager.control.admission.still_open(hold.hold)) == 8
    waiter = asyncio.create_task(desk.manager.drain(desk.caller, hold, patient))
    await desk.finish(dispatches)
    assert (await waiter).left == 0
    assert desk.manager.control.ledger.counts["rollouts_sealed"] == 8


async def test_an_abort_call_that_failed_leaves_the_hold_and_can_be_repeated(desk: Desk) -> None:
    """16. One of the engines does not answer."""
    desk.engines.paused.clear()
    desk.engines.broken.append("cancel")
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    stop = DrainPolicy(Drain.BOUNDARY, 0.02, DrainAction.CANCEL)
    with pytest.raises(EngineFailed):
        await desk.manager.drain(desk.caller, hold, stop)
    assert await desk.take(timeout=0.02) == []
    assert (await desk.manager.drain(desk.caller, hold, stop)).left == 3
    await desk.manager.release(desk.caller, hold.hold)
    assert len(await desk.take()) == 8


# ---------------------------------------------------------------------- holds in all orders


@pytest.mark.parametrize("order", [order for n in range(1, 5) for order in permutations(range(n))], ids=str)
def test_admission_reopens_exactly_at_the_last_release_in_whatever_order(order: tuple[int, ...]) -> None:
    """43, 45. One to four owners; each releases twice, and owner 2 is silent until its hold expires instead."""
    bench = Bench()
    holds = [
        bench.control.acquire(f"owner {owner}", "test", owner, 5.0 if owner == 2 else 1000.0) for owner in sorted(order)
    ]
    epoch = bench.control.admission.epoch
    bench.flush()
    for owner in order:
        assert bench.control.admission.epoch == epoch
        assert everything(bench) == []
        assert isinstance(bench.control.try_lease(), Wait)
        if owner == 2:
            bench.clock.advance(6.0)
            assert bench.control.expire() == [holds[2]]
        for _ in range(2):
            bench.control.admission.release(holds[owner].hold)
    assert bench.control.admission.epoch == epoch + 1
    assert len(everything(bench)) == 8


async def test_engines_stay_paused_under_a_hold_when_another_one_ends(desk: Desk) -> None:
    """43. A weight change in progress must not meet open model calls."""
    update = await desk.manager.acquire(desk.caller, "update", 60.0)
    await desk.manager.drain(desk.caller, update, IN_FLIGHT)
    other = await desk.manager.acquire(desk.caller, "checkpoint", 60.0)
    await desk.manager.release(desk.caller, other.hold)
    assert desk.engines.keeping_back
    await desk.manager.release(desk.caller, update.hold)
    assert not desk.engines.keeping_back


@pytest.mark.parametrize("how", ["silence", "another driver"])
async def test_engines_go_on_when_the_hold_that_paused_them_ends_without_its_owner(how: str) -> None:
    """44. Admission is open again, so generation must be able to run."""
    async with Desk().opened() as desk:
        update = await desk.manager.acquire(desk.caller, "update", 0.5 if how == "silence" else 60.0)
        await desk.manager.drain(desk.caller, update, IN_FLIGHT)
        if how == "silence":
            await until(lambda: desk.manager.control.admission.is_open)
            await soon()
        else:
            await desk.attach("flow")
        assert desk.manager.control.admission.is_open
        await until(lambda: not desk.engines.keeping_back)


def _report_all(bench: Bench) -> None:
    bench.control.report(bench.report_of(everything(bench)))


def _complete_all(bench: Bench) -> None:
    bench.seal(everything(bench))


def _lease(bench: Bench) -> None:
    _complete_all(bench)
    bench.grant()


MOMENTS: dict[str, tuple[int, Callable[[Bench], object]]] = {
    "before the first reservation": (0, lambda bench: None),
    "between reservation and start": (8, lambda bench: bench.control.take("w", 0)),
    "while generating": (8, everything),
    "between the end and its publication": (8, _report_all),
    "when a batch could be leased": (0, _complete_all),
    "while a lease is open": (0, _lease),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_hold_at_any_moment_sees_what_executes_and_lets_nothing_new_begin(moment: str) -> None:
    """44. Nothing is reserved or leased under it, what runs may end, and afterwards everything goes on."""
    frontier, prepare = MOMENTS[moment]
    bench = Bench()
    prepare(bench)
    began = bench.counts("group_reserved"), bench.counts("lease_issued"), bench.counts("attempts_minted")
    hold = bench.control.acquire("driver", "test", 1, 1000.0)
    assert hold.frontier == len(bench.control.admission.still_open(hold.hold)) == frontier
    running = everything(bench) if moment == "between reservation and start" else []
    bench.flush()
    if running:
        bench.seal(running)
    bench.control.try_lease()
    assert (bench.counts("group_reserved"), bench.counts("lease_issued"), bench.counts("attempts_minted")) == began
    bench.control.lose_worker("w")
    assert bench.control.admission.still_open(hold.hold) == ()
    bench.control.admission.release(hold.hold)
    for _ in range(3):
        bench.seal(everything(bench))
        bench.train()
    assert bench.control.ledger.step == 3


@pytest.mark.parametrize("broken", ["activate", "reply of activate"])
async def test_an_update_that_failed_before_or_after_its_effect_is_repeated_to_one_version(
    broken: str, desk: Desk
) -> None:
    """47. The version is recorded once, whatever is known of the push."""
    await desk.finish(await desk.take(4))
    await desk.commit(await desk.lease())
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    desk.engines.broken.append(broken)
    policies = [await desk.manager.publish_policy(desk.caller, "weights-1") for _ in range(2)]
    with pytest.raises(EngineFailed):
        await desk.manager.activate(desk.caller, hold)
    policies.append(await desk.manager.publish_policy(desk.caller, "weights-1"))
    await desk.manager.activate(desk.caller, hold)
    await desk.manager.release(desk.caller, hold.hold)
    assert {policy.number for policy in policies} == {1}
    assert desk.manager.control.ledger.counts["policy_published"] == 2, "versions 0 and 1"
    assert (await desk.manager.status())["serving_version"] == 1


# ---------------------------------------------------------------------- checkpoints


async def test_a_checkpoint_during_a_long_generation_waits_for_none(desk: Desk) -> None:
    """58. Outstanding groups are in the journal, so a capture needs no drain."""
    await desk.finish(await desk.take(4))
    await desk.commit(await desk.lease())
    await desk.update(1)
    await desk.take()
    started = time.monotonic()
    hold = await desk.manager.acquire(desk.caller, "checkpoint", 60.0)
    await desk.manager.prepare_checkpoint(desk.caller, hold)
    await desk.manager.publish_checkpoint(desk.caller, 1, "manifest", "digest", 1, 1)
    await desk.manager.release(desk.caller, hold.hold)
    assert time.monotonic() - started < 2.0
    status = await desk.manager.status()
    assert (status["checkpoint"], status["live"]) == (1, 8)


def test_a_checkpoint_of_the_same_or_an_older_step_is_a_no_op_and_one_of_no_step_is_refused() -> None:
    """55. Saved twice, and saved late."""
    bench = Bench()
    for _ in range(2):
        bench.seal(everything(bench))
        bench.train()
    bench.control.publish_checkpoint(2, "two", "digest", 1, 1)
    before = bench.writer.last_seq
    for step in (2, 1):
        bench.control.publish_checkpoint(step, "again", "other", 1, 1)
    assert bench.writer.last_seq == before
    with pytest.raises(TidegateError):
        bench.control.publish_checkpoint(3, "three", "digest", 1, 1)
    assert bench.writer.last_seq == before


# ---------------------------------------------------------------------- the end


def _lose_all(bench: Bench) -> None:
    for dispatch in everything(bench):
        bench.fail(dispatch)


STAGES: dict[str, Callable[[Bench], object]] = {
    "nothing": lambda bench: None,
    "reserved and queued": lambda bench: bench.control.take("w", 0),
    "generating": everything,
    "in backoff": _lose_all,
    "sealed, not durable": _report_all,
    "completed": _complete_all,
    "held": lambda bench: (everything(bench), bench.control.acquire("driver", "update", 1, 1000.0)),
    "no engine serves": lambda bench: (everything(bench), bench.control.serve(None)),
    "rolled back": lambda bench: (bench.seal(everything(bench)), bench.control.leasing.roll_back(
        bench.grant().lease.lease, "untouched")),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_can_be_finished_from_every_stage_and_settles_each_group_once(stage: str) -> None:
    """60. Nothing runs on, all permits are back, whatever comes later is refused or ignored."""
    bench = Bench()
    STAGES[stage](bench)
    late = [bench.report_of([dispatch]) for dispatch in everything(bench)]
    frontier = bench.control.ledger.frontier
    for _ in range(3):
        bench.control.finish("enough")
    ledger = bench.control.ledger
    assert (ledger.retained, ledger.live, ledger.dispatched) == (0, 0, 0)
    assert len(ledger.discarded) == frontier
    assert bench.counts("run_finished") == {"": 1}
    assert everything(bench) == []
    assert isinstance(bench.control.try_lease(), Wait)
    assert [bench.control.report(report).accepted for report in late] == [0] * len(late)
    bench.flush()
    report = verify(bench.store, RUN)
    assert (report.finished, report.unsettled, report.lost) == ("enough", 0, 0)


def test_a_finished_run_stays_closed_for_its_next_incarnation() -> None:
    """60. A resume is a no-op: it hands out no work, whatever serves."""
    bench = Bench()
    bench.control.finish("enough")
    bench.flush()
    bench.restart()
    bench.control.serve(0)
    assert everything(bench) == []
    assert "enough" in bench.waits().reason


async def test_an_end_that_failed_three_times_succeeds_at_last_and_settles_nothing_twice(desk: Desk) -> None:
    """61. The store comes back after three tries."""
    await desk.finish((await desk.take())[:4])
    desk.store.down = True
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match="no room"):
            await desk.manager.finish(desk.caller, "enough")
    desk.store.down = False
    await desk.manager.finish(desk.caller, "enough")
    counts = desk.manager.control.ledger.counts
    assert (counts["run_finished"], counts["group_discarded"]) == (1, 1)
    report = verify(desk.store, RUN)
    assert (report.finished, report.discarded, report.unsettled) == ("enough", 4, 0)


def test_a_lost_worker_touches_neither_the_backlog_nor_a_hold_nor_a_lease() -> None:
    """62. With finished groups, a hold, and an open lease at once."""
    bench = Bench(staleness=None, max_executing=12)
    taken = everything(bench)
    bench.seal(taken[:6])
    grant = bench.grant()
    hold = bench.control.acquire("driver", "update", 1, 1000.0)
    assert bench.control.lose_worker("w") == 6
    assert [bench.place(ordinal) for ordinal in range(6)] == ["leased", "leased", "completed", *["reserved"] * 3]
    assert bench.control.admission.still_open(hold.hold) == ()
    bench.control.admission.renew(hold.hold, hold.epoch)
    with pytest.raises(LeaseRefused):
        bench.control.finish("enough")
    bench.control.admission.release(hold.hold)
    assert bench.commit(grant) == (0, 1)
    bench.seal(everything(bench))
    assert bench.train() == (2, 3)
    assert bench.counts("abandoned_") == {Outcome.WORKER_LOST.value: 6}

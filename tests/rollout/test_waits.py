"""Who waits for what is visible, a circle of waits has a name, and an expired hold ends what runs under it first."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gpu.rollout import watchdog
from gpu.rollout.drain import Drain, DrainAction, DrainPolicy
from gpu.rollout.messages import Outcome, Wait
from gpu.rollout.waits import Waits, find_circle
from storage.clock import VirtualClock
from storage.errors import DeadlineExceeded, HoldRefused, QuarantineRefused
from storage.ledger import Policy
from tests.faults.house import until
from tests.rollout.building import Bench
from tests.rollout.desk import Desk, Engines

# ---------------------------------------------------------------------- waits


def test_a_wait_lasts_while_its_gate_is_the_same_and_its_seconds_are_counted() -> None:
    clock = VirtualClock()
    waits = Waits(clock)
    waits.note("submission", Wait("7 of 8", "the trainer", "P", "trainer"))
    clock.advance(2.0)
    waits.note("submission", Wait("8 of 8", "the trainer", "P", "trainer"))
    clock.advance(1.0)
    assert waits.status() == [
        {"component": "submission", "waits_for": "8 of 8", "since_s": pytest.approx(3.0), "who": "the trainer"}
    ]
    waits.note("submission", Wait("bound", "the trainer", "staleness", "trainer"))
    clock.advance(4.0)
    waits.note("submission", None)
    assert waits.status() == []
    assert waits.seconds() == {"submission.P": pytest.approx(3.0), "submission.staleness": pytest.approx(4.0)}


@pytest.mark.parametrize(
    ("on", "circle"),
    [
        ({}, []),
        ({"a": "b"}, []),
        ({"a": "", "b": "a"}, []),
        ({"a": "a"}, ["a"]),
        ({"a": "b", "b": "c", "c": "a"}, ["a", "b", "c"]),
        ({"x": "a", "a": "b", "b": "a"}, ["a", "b"]),
    ],
)
def test_a_circle_is_found_wherever_one_enters_it(on: dict[str, str], circle: list[str]) -> None:
    found = find_circle(on)
    assert sorted(found) == sorted(circle)


async def test_status_says_of_each_component_what_it_waits_for_since_when_and_who_can_end_it(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.manager.lease(desk.caller, 10.0))
    await desk.take()
    await asyncio.sleep(0.05)
    status = await desk.manager.status()
    found = {one["component"]: one for one in status["waits"]}  # type: ignore[attr-defined]
    assert "groups must finish before version 1" in found["trainer"]["waits_for"]
    assert found["trainer"]["since_s"] > 0
    assert "generation" in found["trainer"]["who"]
    assert "staleness bound 1" in found["submission"]["waits_for"] or "executing" in found["submission"]["waits_for"]
    assert "workers" not in found, "they are busy"
    assert status["circle"] == ""
    waiting.cancel()


async def test_a_circle_of_waits_is_named_in_status_in_the_log_and_in_the_error(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that hands out nothing more while a batch is short of groups, as only a defect could bring it about:
    submission is told that the completed capacity is full although no group is there."""
    monkeypatch.setattr(watchdog, "STANDS_S", 0.2)
    desk.manager.control.ledger.dispatched = desk.manager.control.limits.max_completed
    with caplog.at_level(logging.ERROR), pytest.raises(DeadlineExceeded) as caught:
        await desk.manager.lease(desk.caller, 0.4)
    assert "circle" in caught.value.found
    for name in ("trainer waits for workers", "workers waits for submission", "submission waits for trainer"):
        assert name in caught.value.found
    assert "op=watchdog" in caplog.text


async def test_a_circle_counts_when_it_has_stood_for_a_while_in_which_nothing_was_recorded(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Two components that hand over to each other both wait for a moment."""
    clock = VirtualClock()
    watch = watchdog.Watchdog(desk.manager, clock)
    taken = await desk.take()
    desk.manager.waits.note("a", Wait("b's turn", "b", "turn", "b"))
    desk.manager.waits.note("b", Wait("a's turn", "a", "turn", "a"))
    assert watch.look() == ""
    clock.advance(watchdog.STANDS_S - 0.1)
    await desk.finish(taken)
    assert watch.look() == "", "something was recorded meanwhile"
    clock.advance(watchdog.STANDS_S - 0.1)
    assert watch.look() == ""
    assert "op=watchdog" not in caplog.text
    clock.advance(0.1)
    assert watch.look() == "a waits for b: b's turn; b waits for a: a's turn"
    assert "op=watchdog" in caplog.text


# ---------------------------------------------------------------------- expiry


class Stuck(Engines):
    """An activation that hangs until it is cancelled; notes whether admission was open when it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.open_at_end: bool | None = None
        self.resumed = 0

    async def activate(self, policy: Policy) -> None:
        assert self.manager is not None
        if policy.number == 0:
            return await super().activate(policy)
        try:
            await asyncio.sleep(30.0)
        finally:
            self.open_at_end = self.manager.control.admission.is_open

    async def resume(self) -> None:
        self.resumed += 1


async def test_a_hold_that_expires_aborts_its_activation_before_admission_reopens(desk: Desk) -> None:
    engines = Stuck()
    engines.manager, desk.manager.engines = desk.manager, engines
    await desk.finish(await desk.take(4))
    grant = await desk.manager.lease(desk.caller, 1.0)
    assert grant is not None
    await desk.manager.commit(desk.caller, grant.lease.lease, 1, "state-1", "weights-1", {})
    hold = await desk.manager.acquire(desk.caller, "update", 0.2)
    await desk.manager.publish_policy(desk.caller, "weights-1")
    with pytest.raises(HoldRefused, match="expired in the middle") as caught:
        await desk.manager.activate(desk.caller, hold)
    assert caught.value.code == "expired"
    assert engines.open_at_end is False
    await until(lambda: desk.manager.control.admission.is_open)
    await until(lambda: engines.resumed == 1)


async def test_engines_that_an_expired_hold_had_paused_go_on(desk: Desk) -> None:
    engines = Stuck()
    engines.manager, desk.manager.engines = desk.manager, engines
    engines.paused.clear()
    hold = await desk.manager.acquire(desk.caller, "update", 0.2)
    with pytest.raises(HoldRefused, match="expired"):
        await desk.manager.drain(desk.caller, hold, DrainPolicy(Drain.BOUNDARY, 30.0, DrainAction.PROCEED))
    await until(lambda: engines.resumed == 1)
    assert desk.manager.control.admission.is_open


async def test_a_cancelled_caller_ends_its_operation_and_not_the_hold(desk: Desk) -> None:
    desk.engines.paused.clear()
    hold = await desk.manager.acquire(desk.caller, "update", 60.0)
    policy = DrainPolicy(Drain.BOUNDARY, 30.0, DrainAction.PROCEED)
    draining = asyncio.create_task(desk.manager.drain(desk.caller, hold, policy))
    await asyncio.sleep(0.05)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    desk.manager.control.admission.confirm(hold.hold, hold.epoch)
    assert await desk.manager.operations.abort(hold.hold) == 0


def test_an_effect_is_refused_from_the_moment_of_expiry_on_not_from_the_next_tick() -> None:
    bench = Bench()
    hold = bench.control.acquire("o", "p", 1, 5.0)
    bench.clock.advance(5.0)
    for effect in (bench.control.prepare_checkpoint, bench.control.admission.renew):
        with pytest.raises(HoldRefused):
            effect(hold.hold, hold.epoch)


# ---------------------------------------------------------------------- quarantine


def spend(bench: Bench) -> int:
    """Let one rollout of group 0 fail until its budget is spent; returns how many attempts that took."""
    attempts = 0
    while 0 not in bench.control.ledger.quarantined:
        for dispatch in bench.control.take("w", 100):
            if dispatch.identity.group == 0:
                attempts += dispatch.identity.sibling == 0
                if dispatch.identity.sibling == 0:
                    bench.fail(dispatch)
                else:
                    bench.seal([dispatch])
        bench.clock.advance(30.0)
    return attempts


def test_a_poison_prompt_costs_its_budget_and_nothing_else_and_the_count_goes_on_after_a_restart() -> None:
    bench = Bench(max_attempts=3, max_executing=2)
    for dispatch in bench.control.take("w", 100):
        if dispatch.identity.sibling == 0:
            bench.fail(dispatch)
    bench.flush()
    bench.restart()
    bench.activate()
    assert spend(bench) == 2, "one of the three attempts was spent before the restart"
    assert bench.control.quarantined() == {0: "3 failed attempts, 0 lost processes"}
    bench.flush()
    others = bench.control.take("w", 100)
    assert [(d.identity.group, d.identity.attempt) for d in others] == [(1, 0), (1, 0)]
    assert bench.control.ledger.counts["abandoned_failed"] == 3
    bench.flush()
    bench.restart()
    assert set(bench.control.quarantined()) == {0}


def test_a_released_group_has_a_fresh_budget_and_new_attempt_numbers() -> None:
    bench = Bench(max_attempts=2)
    spend(bench)
    before = bench.control.ledger.quarantined[0].attempts
    bench.control.release_quarantined([0])
    bench.flush()
    again = [d for d in bench.control.take("w", 100) if d.identity.group == 0]
    assert [d.identity.attempt for d in again] == [attempt + 1 for attempt in before]
    bench.control.check_conservation()
    bench.fail(again[0])
    assert 0 in bench.control.ledger.groups, "one failure is not the budget"


def test_a_release_of_groups_that_are_not_quarantined_releases_none() -> None:
    bench = Bench(max_attempts=2)
    spend(bench)
    with pytest.raises(QuarantineRefused, match=r"\[1\]"):
        bench.control.release_quarantined([0, 1])
    assert set(bench.control.quarantined()) == {0}
    bench.control.finish("done")
    with pytest.raises(QuarantineRefused, match="finished"):
        bench.control.release_quarantined([0])


async def test_a_release_is_durable_when_it_returns_and_fails_when_the_store_is_down(desk: Desk) -> None:
    taken = await desk.take(100)
    poison = [d for d in taken if d.identity.group == 0]
    for _ in range(3):
        await desk.finish(poison, Outcome.FAILED)
        desk.manager.control.scheduler.backoff.drop(0)
        poison = [d for d in await desk.take(100, timeout=0.0) if d.identity.group == 0]
    assert list(await desk.manager.quarantined()) == [0]
    desk.store.down = True
    with pytest.raises(DeadlineExceeded, match="the release"):
        await desk.manager.release_quarantined([0])
    desk.store.down = False
    await until(lambda: desk.manager.control.books.journal.durable_seq == desk.manager.control.books.journal.last_seq)
    assert await desk.manager.quarantined() == {}


# ---------------------------------------------------------------------- figures


async def test_the_figures_count_what_happened(desk: Desk) -> None:
    taken = await desk.take(100)
    await desk.finish(taken[:1], Outcome.FAILED)
    await desk.finish(taken[2:6])
    grant = await desk.manager.lease(desk.caller, 1.0)
    assert grant is not None
    await desk.manager.commit(desk.caller, grant.lease.lease, 1, "state-1", "weights-1", {})
    await desk.update(1)
    found = await desk.manager.metrics()
    assert found["groups_consumed"] == 2
    assert found["abandoned_failed_total"] == 1
    assert found["groups_in_backoff"] == 1
    assert found["tokens_generated_total"] == 4
    assert found["staleness_consumed_max"] == 0
    assert found["staleness_consumed/0"] == 2
    assert found["hold_s_total/flow"] > 0
    assert found["oldest_group_s"] > 0
    assert all(isinstance(value, int | float) for value in found.values())

"""Adversarial scenarios from the buffer to the commit, and at the end of a source.

Numbers ("38.") are those of the project's list of scenarios; see `test_scenarios` and `test_scenarios_of_holds`.
"""

from __future__ import annotations

import asyncio

import pytest

from gpu.rollout.limits import Order
from gpu.rollout.messages import Dispatch
from gpu.rollout.results import zero_variance
from storage.errors import LeaseRefused, TidegateError
from storage.journal import JournalWriter, Tail, read_journal, rows_of, store_frozen
from storage.memory import MemoryStore
from storage.runs import create_run, open_run
from storage.verify import verify
from tests.rollout.building import RUN, Bench, ordinals
from tests.rollout.desk import Desk, soon, until


def everything(bench: Bench) -> list[Dispatch]:
    return bench.control.take("w", 1000)


# ---------------------------------------------------------------------- the buffer


def test_eviction_never_takes_what_a_lease_holds() -> None:
    """30. Overflow while a batch is being trained."""
    bench = Bench(batch=2, eviction_cap=2, staleness=None, max_executing=10)
    taken = everything(bench)
    bench.seal(taken[:4])
    grant = bench.grant()
    bench.seal(taken[4:10])
    assert bench.counts("requeued_") == {"overflow": 1}
    assert [bench.place(ordinal) for ordinal in range(5)] == ["leased", "leased", "reserved", "completed", "completed"]
    assert bench.commit(grant) == (0, 1)


def test_with_everything_equally_stale_the_oldest_groups_are_evicted() -> None:
    """30. No dice."""
    bench = Bench(batch=2, eviction_cap=3, staleness=None, max_executing=12)
    taken = everything(bench)
    bench.seal(taken[6:] + taken[:6])
    assert [bench.place(ordinal) for ordinal in range(6)] == ["reserved"] * 3 + ["completed"] * 3


def test_newest_first_does_not_sink_old_groups_under_a_bound() -> None:
    """30. Each is trained within its bound or the trainer waits for it."""
    bench = Bench(num_siblings=1, batch=2, order=Order.LIFO, staleness=2, max_executing=8)
    for _ in range(20):
        bench.seal(everything(bench))
        bench.train()
    assert set(range(40 - 6)) <= set(bench.control.ledger.consumed)


def test_a_requeue_that_never_became_durable_happens_again() -> None:
    """6. The group stays owned whatever the store does."""
    bench = Bench(staleness=0, batch=2, backoff_base_s=100.0, backoff_max_s=100.0)
    taken = everything(bench)
    bench.seal([taken[0], taken[2], taken[3]])
    bench.fail(taken[1])
    bench.flush()
    bench.waits()
    assert bench.counts("requeued_") == {"deadline": 1}
    bench.restart()
    bench.activate()
    assert bench.counts("requeued_") == {}
    again = everything(bench)
    assert [str(dispatch.identity) for dispatch in again] == ["g0/1~1@2"], "the sealed sibling is still there"
    bench.seal(again)
    assert bench.train() == (0, 1)


# ---------------------------------------------------------------------- the lease


def test_a_batch_that_was_rolled_back_is_the_first_to_be_leased_again() -> None:
    """38. Completion order, which a rollback does not change."""
    bench = Bench(staleness=None)
    bench.seal(everything(bench))
    first = bench.grant()
    bench.control.leasing.roll_back(first.lease.lease, "untouched")
    bench.flush()
    assert ordinals(bench.grant()) == ordinals(first)


@pytest.mark.parametrize("change", ["step", "state", "weights", "lease"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_repeated_commit_with_other_content_is_refused(change: str, restart: bool) -> None:
    """38. Only the very same commit is a repeat."""
    bench = Bench()
    bench.seal(everything(bench))
    done = {"lease": bench.grant().lease.lease, "step": 1, "state": "s", "weights": "w"}
    bench.control.leasing.commit(done["lease"], 1, "s", "w", {})
    if restart:
        bench.flush()
        bench.restart()
    bench.control.leasing.commit(done["lease"], 1, "s", "w", {})
    other = {**done, change: 7 if change in ("step", "lease") else "other"}
    before = bench.writer.last_seq
    with pytest.raises(LeaseRefused):
        bench.control.leasing.commit(other["lease"], other["step"], other["state"], other["weights"], {})
    assert (bench.writer.last_seq, bench.control.ledger.step) == (before, 1)


def test_a_batch_that_was_only_looked_at_cannot_be_settled() -> None:
    """38. `peek` moves payload and grants nothing."""
    bench = Bench()
    bench.seal(everything(bench))
    seen = bench.control.leasing.peek(2)
    assert seen is not None
    with pytest.raises(LeaseRefused):
        bench.control.leasing.commit(seen.lease.lease, 1, "", "", {})
    with pytest.raises(LeaseRefused):
        bench.control.leasing.roll_back(seen.lease.lease, "no")


async def test_an_owner_that_died_leaves_its_batch_to_the_next_one(desk: Desk) -> None:
    """38. The lease is detectable and recoverable, and its late owner settles nothing."""
    await desk.finish(await desk.take(4))
    grant, dead = await desk.lease(), desk.caller
    desk.caller = (await desk.attach("flow")).caller
    again = await desk.lease()
    assert again.lease == grant.lease
    with pytest.raises(TidegateError, match="driver"):
        await desk.manager.commit(dead, grant.lease.lease, 1, "late", "late", {})
    await desk.commit(again)
    assert (await desk.manager.status())["consumed"] == 2


@pytest.mark.parametrize("fate", ["committed", "not committed", "unknown"])
def test_a_commit_whose_reply_was_lost_with_its_manager_counts_once(fate: str) -> None:
    """5, 39. The trainer repeats its commit to whoever comes next."""
    bench = Bench()
    bench.seal(everything(bench))
    lease = bench.grant().lease
    bench.flush()
    bench.control.leasing.commit(lease.lease, 1, "s", "w", {})
    if fate == "committed":
        bench.flush()
    elif fate == "unknown":
        bench.freeze()
        bench.land(confirmed=False)
    bench.restart()
    assert bench.control.ledger.step == (0 if fate == "not committed" else 1)
    for _ in range(2):
        bench.control.leasing.commit(lease.lease, 1, "s", "w", {})
    bench.flush()
    report = verify(bench.store, RUN)
    assert (report.steps, report.consumed, report.trained_twice) == (1, 2, 0)


async def test_a_completion_between_the_look_and_the_wait_wakes_the_waiter(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24. The capacity check found nothing, and before the wait began a rollout ended."""
    taken = await desk.take(8)
    control, look = desk.manager.control, desk.manager.control.take

    def take(worker: str, limit: int) -> list[Dispatch]:
        found = look(worker, limit)
        if not found:
            monkeypatch.setattr(control, "take", look)
            desk.manager.lose_worker("w")
        return found

    monkeypatch.setattr(control, "take", take)
    work = await asyncio.wait_for(desk.take(worker="v", timeout=60.0), 5.0)
    assert len(work) == len(taken)


async def test_a_full_buffer_a_cancelled_consumer_and_a_hold_do_not_lock_each_other() -> None:
    """28. Whoever publishes has room, so the hold's frontier ends without a consumer."""
    async with Desk(staleness=None, max_executing=12).opened() as desk:
        dispatches = await desk.take(12)
        hold = await desk.manager.acquire(desk.caller, "update", 60.0)
        waiting = asyncio.create_task(desk.lease(10.0))
        await soon()
        waiting.cancel()
        await desk.finish(dispatches)
        await until(lambda: not desk.manager.control.admission.still_open(hold.hold))
        await desk.manager.release(desk.caller, hold.hold)
        await desk.commit(await desk.lease())
        assert len(await desk.take()) == 4


# ---------------------------------------------------------------------- the end of a source, and every prefix of a run


async def test_the_end_of_a_source_is_one_short_batch_and_then_everybody_is_told() -> None:
    """64. A finite source whose length is no multiple of the batch."""
    async with Desk(length=3).opened() as desk:
        await desk.finish(await desk.take())
        first = await desk.lease()
        assert (len(ordinals(first)), first.lease.final) == (2, False)
        await desk.commit(first)
        last = await desk.lease()
        assert (len(ordinals(last)), last.lease.final) == (1, True)
        await desk.commit(last)
        for _ in range(2):
            assert await desk.manager.lease(desk.caller, 5.0) is None
        assert await desk.take(timeout=0.05) == []
        assert (await desk.manager.status())["submission_waits_for"] != ""


def small_run() -> Bench:
    """Three groups, with a failure, a lost worker, a rollback, a filtered group and a turn, each call durable."""
    bench = Bench(length=3, batch=2, max_executing=4, group_filter=zero_variance, backoff_base_s=0.0)
    taken = everything(bench)
    bench.control.report(bench.turn_of(taken[0], 0, 0))
    bench.flush()
    bench.fail(taken[0])
    bench.flush()
    bench.control.lose_worker("w")
    bench.flush()
    to_the_end(bench)
    return bench


def to_the_end(bench: Bench) -> None:
    for _ in range(50):
        for dispatch in everything(bench):
            reward = float(dispatch.identity.sibling or dispatch.identity.group == 1)
            bench.seal([dispatch], reward)
        found = bench.control.try_lease()
        bench.flush()
        if found is None:
            bench.control.finish("source exhausted")
            bench.flush()
            return
        if bench.control.ledger.lease is not None:
            if bench.control.ledger.lease.lease == 1:
                bench.control.leasing.roll_back(1, "untouched")
                bench.flush()
            bench.train()
    raise AssertionError(f"no end: {bench.control.status()}")


def test_from_every_moment_of_a_small_run_a_successor_trains_exactly_what_is_untrained() -> None:
    """54. Killed after every durable call: the union over both lives is the source, each once."""
    whole = small_run()
    info, segments = open_run(whole.store, RUN), list(read_journal(whole.store, RUN))
    assert len(segments) > 12
    for cut in range(1, len(segments) + 1):
        bench = Bench(length=3, batch=2, max_executing=4, group_filter=zero_variance, backoff_base_s=0.0)
        bench.store = MemoryStore()
        create_run(bench.store, info)
        writer = JournalWriter(RUN, 1, "first", Tail(), bench.clock)
        for row in rows_of(segments[:cut]):
            writer.append(row.record, row.blob)
        store_frozen(bench.store, RUN, 1, writer.freeze())
        bench.restart()
        if not bench.control.ledger.finished:
            bench.activate()
            to_the_end(bench)
        report = verify(bench.store, RUN)
        assert report.sound, (cut, report.problems)
        assert (report.consumed, report.discarded, report.unsettled, report.trained_twice) == (2, 1, 0, 0), cut

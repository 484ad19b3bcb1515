"""Ownership: each rule of the rollout contract that the slice promises, on the real control and journal."""

from __future__ import annotations

import math

import pytest

from gpu.rollout.limits import Order, Submission
from gpu.rollout.messages import Ended, Identity, Outcome, Report, Wait
from gpu.rollout.results import zero_variance
from storage.errors import HoldRefused, LeaseRefused, LedgerInvalid
from storage.verify import verify
from tests.rollout.building import RUN, Bench


def waits(bench: Bench) -> str:
    found = bench.control.try_lease()
    assert isinstance(found, Wait)
    return found.reason


class TestSubmission:
    def test_whole_groups_are_minted_and_each_attempt_is_dispatched_once(self) -> None:
        bench = Bench()
        first, second = bench.control.take("a", 3), bench.control.take("b", 10)
        assert [str(d.identity) for d in first] == ["g0/0~0@1", "g0/1~0@1", "g1/0~0@1"]
        assert len(second) == 5
        assert not {d.identity for d in first} & {d.identity for d in second}

    def test_sample_policy_returns_credits_one_by_one_but_submits_whole_groups(self) -> None:
        bench = Bench(max_executing=4)
        taken = bench.control.take("w", 10)
        assert len(taken) == 4
        bench.seal(taken[:1])
        assert bench.control.take("w", 10) == []
        bench.seal(taken[1:2])
        assert len(bench.control.take("w", 10)) == 2

    def test_group_policy_counts_groups(self) -> None:
        bench = Bench(submission=Submission.GROUP, max_executing=2)
        taken = bench.control.take("w", 10)
        assert len(taken) == 4
        bench.seal(taken[:1])
        assert bench.control.take("w", 10) == []
        bench.seal(taken[1:2])
        assert len(bench.control.take("w", 10)) == 2

    def test_completed_capacity_is_taken_at_dispatch_so_finished_work_is_never_thrown_away(self) -> None:
        bench = Bench(staleness=None, max_completed=4, max_retained=4, max_executing=100)
        taken = bench.control.take("w", 100)
        assert len(taken) == 8
        bench.seal(taken)
        assert bench.control.take("w", 100) == []
        assert "completed (P): 4 of 4" in bench.control.scheduler.why_idle().reason
        bench.train()
        assert len(bench.control.take("w", 100)) == 4

    def test_the_staleness_bound_limits_what_is_unsettled(self) -> None:
        bench = Bench(staleness=1, batch=2, max_completed=20, max_retained=20, max_executing=100)
        assert len(bench.control.take("w", 100)) == 2 * 4
        assert "staleness bound 1" in bench.control.scheduler.why_idle().reason

    def test_nothing_starts_before_an_engine_serves_the_published_version(self) -> None:
        bench = Bench()
        bench.control.serve(None)
        assert bench.control.take("w", 10) == []
        assert "no engine" in bench.control.scheduler.why_idle().reason
        with pytest.raises(LedgerInvalid, match="published version"):
            bench.control.serve(5)

    def test_an_undurable_tail_closes_admission_with_that_reason(self) -> None:
        bench = Bench(undurable_age_s=1.0)
        bench.control.take("w", 1)
        bench.clock.advance(2.0)
        assert "not durable for 2.0 s" in bench.control.scheduler.why_idle().reason
        bench.flush()
        assert "not durable" not in bench.control.scheduler.why_idle().reason

    def test_a_finite_source_ends_with_one_short_final_batch(self) -> None:
        bench = Bench(length=3)
        bench.seal(bench.control.take("w", 10))
        assert len(bench.train()) == 2
        grant = bench.control.try_lease()
        assert grant is not None
        assert grant.lease.final
        bench.train()
        assert bench.control.try_lease() is None
        bench.control.finish("end")
        bench.flush()
        report = verify(bench.store, RUN)
        # The hand-written digests of this bench are not those of a trainer; the ownership part must be sound.
        assert (report.consumed, report.unsettled, report.lost) == (3, 0, 0)

    def test_the_rest_of_a_source_can_be_discarded_instead(self) -> None:
        bench = Bench(length=3, discard_end_of_source=True)
        bench.seal(bench.control.take("w", 10))
        bench.train()
        assert bench.control.try_lease() is None
        assert list(bench.control.ledger.discarded) == [2]


class TestResults:
    def test_a_group_enters_the_buffer_only_when_its_seal_is_durable(self) -> None:
        bench = Bench(batch=1, staleness=None)
        taken = bench.control.take("w", 2)
        bench.control.report(bench.report_of(taken))
        assert "0 of 1 groups" in waits(bench)
        bench.flush()
        assert bench.control.try_lease().lease.groups[0].ordinal == 0

    def test_a_repeated_report_changes_nothing(self) -> None:
        bench = Bench()
        report = bench.report_of(bench.control.take("w", 2))
        assert bench.control.report(report).accepted == 2
        seq = bench.writer.last_seq
        assert bench.control.report(report).accepted == 0
        assert bench.writer.last_seq == seq

    def test_late_results_of_an_older_attempt_or_incarnation_settle_nothing(self) -> None:
        bench = Bench()
        taken = bench.control.take("w", 2)
        late = bench.report_of(taken)
        bench.fail(taken[0], Outcome.ENGINE_LOST)
        again = bench.control.take("w", 1)[0]
        assert again.identity == Identity(0, 0, 1, 1)
        assert bench.control.report(late).accepted == 1, "only the sibling that is still live counts"
        assert bench.control.results.ignored["sealed"] == 1
        bench.restart()
        bench.activate()
        assert bench.control.report(bench.report_of([again])).accepted == 0

    def test_sealed_siblings_stay_and_only_the_rest_is_tried_again(self) -> None:
        bench = Bench()
        taken = bench.control.take("w", 2)
        bench.seal(taken[:1])
        bench.fail(taken[1])
        assert all(d.identity.group != 0 for d in bench.control.take("w", 10)), "group 0 is in backoff"
        bench.clock.advance(1.1)
        assert [str(d.identity) for d in bench.control.take("w", 10)] == ["g0/1~1@1"]

    def test_a_failure_costs_its_attempt_budget_and_nothing_else(self) -> None:
        bench = Bench(max_attempts=2)
        for attempt in range(2):
            dispatch = next(
                d for d in bench.control.take("w", 100) if d.identity.group == 0 and d.identity.sibling == 0
            )
            assert dispatch.identity.attempt == attempt
            bench.fail(dispatch)
            bench.flush()
            bench.clock.advance(10.0)
        assert bench.control.ledger.quarantined == {}, "a sibling is live"
        sibling = Identity(0, 1, 0, 1)
        bench.control.results.abandon(sibling, Outcome.ABORTED, "")
        assert "2 failed attempts" in bench.control.ledger.quarantined[0].reason
        bench.control.check_conservation()

    def test_the_budget_goes_on_after_a_resume(self) -> None:
        bench = Bench(max_attempts=2)
        bench.fail(bench.control.take("w", 2)[0])
        bench.flush()
        bench.restart()
        bench.activate()
        taken = bench.control.take("w", 2)
        assert taken[0].identity == Identity(0, 0, 1, 2)
        bench.fail(taken[0])
        bench.fail(taken[1])
        assert 0 in bench.control.ledger.quarantined

    def test_lost_processes_do_not_count_as_failures_of_the_prompt(self) -> None:
        bench = Bench(max_attempts=1, max_losses=3)
        for _ in range(2):
            bench.control.take("w", 100)
            bench.control.lose_worker("w")
        assert bench.control.ledger.quarantined == {}
        bench.control.take("w", 100)
        bench.control.lose_worker("w")
        assert 0 in bench.control.ledger.quarantined

    @pytest.mark.parametrize("change", ["nan", "infinite", "no tokens", "old version"])
    def test_a_result_that_breaks_a_rule_is_malformed_and_never_a_reward(self, change: str) -> None:
        bench = Bench()
        taken = bench.control.take("w", 100)
        made = bench.report_of(taken[:1]).ended[0]
        bad = {
            "nan": Ended(made.identity, Outcome.SEALED, 0, 1, made.oldest, math.nan),
            "infinite": Ended(made.identity, Outcome.SEALED, 0, 1, made.oldest, math.inf),
            "no tokens": Ended(made.identity, Outcome.SEALED, 0, 0, made.oldest, 1.0),
            "old version": Ended(made.identity, Outcome.SEALED, 0, 1, made.oldest - 1, 1.0),
        }[change]
        bench.control.report(Report("w", "x", "", 0, None, (), (bad,)))
        assert bench.control.ledger.counts["abandoned_malformed"] == 1
        assert "x" not in bench.control.ledger.blocks

    def test_a_filtered_group_is_settled_without_training_and_refilled(self) -> None:
        bench = Bench(group_filter=zero_variance, staleness=0)
        taken = bench.control.take("w", 100)
        assert len(taken) == 4
        bench.seal(taken[:2])
        assert list(bench.control.ledger.discarded) == [0]
        assert len(bench.control.take("w", 100)) == 2, "discards are refilled at the same version"

    def test_eviction_is_optional_and_takes_the_stalest_first(self) -> None:
        bench = Bench(eviction_cap=2, staleness=None)
        taken = bench.control.take("w", 6)
        bench.seal(taken[4:6])
        bench.seal(taken[2:4])
        bench.seal(taken[0:2])
        bench.control.report(Report("w", "", "", 0, None, (), ()))
        assert sorted(bench.control.ledger.completed) == [1, 2]
        assert bench.control.ledger.counts["requeued_overflow"] == 1

    def test_hot_payloads_spill_at_the_bound_and_leave_with_their_groups(self) -> None:
        bench = Bench(batch=1, staleness=None, max_hot_bytes=10_000)
        taken = bench.control.take("w", 8)
        for start in range(0, 8, 2):
            bench.seal(taken[start : start + 2])
        hot = bench.control.books.hot
        assert hot.num_bytes <= 10_000
        assert hot.spilled > 0
        bench.train()
        bench.train()
        assert hot.num_bytes == sum(len(data) for data in hot._blocks.values())


class TestLeases:
    def ready(self, groups: int = 4, **changes: object) -> Bench:
        bench = Bench(**changes)
        bench.seal(bench.control.take("w", groups * 2))
        return bench

    def test_one_lease_at_a_time_is_issued_again_to_whoever_asks(self) -> None:
        bench = self.ready()
        first, again = bench.control.try_lease(), bench.control.try_lease()
        assert first.lease == again.lease
        assert [group.ordinal for group in first.lease.groups] == [0, 1]

    def test_a_grant_carries_references_state_and_hot_bytes(self) -> None:
        grant = self.ready().control.try_lease()
        names = {name for group in grant.lease.groups for rows in group.rows for name, _ in rows}
        assert set(grant.blocks) == set(grant.hot) == names

    def test_a_commit_repeated_after_a_lost_reply_is_harmless(self) -> None:
        bench = self.ready()
        lease = bench.control.try_lease().lease
        for _ in range(2):
            bench.control.leasing.commit(lease.lease, 1, "s", "w", {})
        assert bench.control.ledger.step == 1
        bench.flush()
        bench.restart()
        bench.control.leasing.commit(lease.lease, 1, "s", "w", {})
        assert bench.control.ledger.step == 1
        with pytest.raises(LeaseRefused):
            bench.control.leasing.commit(lease.lease, 1, "another state", "w", {})

    def test_a_rollback_keeps_the_work_and_can_be_repeated(self) -> None:
        bench = self.ready()
        lease = bench.control.try_lease().lease
        for _ in range(2):
            bench.control.leasing.roll_back(lease.lease, "untouched")
        assert bench.control.ledger.lease is None
        assert len(bench.control.ledger.completed) == 4
        assert bench.control.try_lease().lease.lease == lease.lease + 1
        with pytest.raises(LeaseRefused):
            bench.control.leasing.commit(lease.lease, 1, "s", "w", {})

    def test_a_committed_lease_is_never_rolled_back(self) -> None:
        bench = self.ready()
        lease = bench.control.try_lease().lease
        bench.control.leasing.commit(lease.lease, 1, "s", "w", {})
        with pytest.raises(LeaseRefused):
            bench.control.leasing.roll_back(lease.lease, "late")

    def test_the_next_incarnation_issues_an_open_lease_again_in_the_same_order(self) -> None:
        bench = self.ready()
        lease = bench.control.try_lease().lease
        bench.flush()
        bench.restart()
        assert bench.control.try_lease().lease == lease

    def test_newest_first_within_the_rule(self) -> None:
        bench = Bench(order=Order.LIFO, batch=1, staleness=None)
        taken = bench.control.take("w", 6)
        for start in (0, 2, 4):
            bench.seal(taken[start : start + 2])
        assert bench.train() == (2,)

    def test_a_group_in_backoff_at_its_deadline_starts_whole_again_instead_of_holding_up_the_batch(self) -> None:
        bench = Bench(staleness=0, batch=2, backoff_base_s=100.0, backoff_max_s=100.0)
        taken = bench.control.take("w", 100)
        bench.seal([taken[0], taken[2], taken[3]])
        bench.fail(taken[1])
        assert bench.control.take("w", 10) == [], "group 0 waits for its next attempt"
        assert "groups are ready" in waits(bench)
        assert bench.control.ledger.counts["requeued_deadline"] == 1
        again = bench.control.take("w", 10)
        assert [d.identity.attempt for d in again] == [1, 1], "both siblings, the sealed one too"
        bench.seal(again)
        assert bench.train() == (0, 1)

    def test_finishing_needs_every_lease_settled_and_then_settles_the_rest(self) -> None:
        bench = self.ready()
        lease = bench.control.try_lease().lease
        with pytest.raises(LeaseRefused):
            bench.control.finish("steps done")
        assert bench.control.admission.is_open
        bench.control.leasing.commit(lease.lease, 1, "s", "w", {})
        bench.control.finish("steps done")
        bench.control.finish("steps done")
        assert bench.control.ledger.finished == "steps done"
        assert bench.control.ledger.retained == 0
        assert bench.control.take("w", 10) == []


class TestHolds:
    def test_a_hold_closes_reservations_and_leases_until_the_last_release(self) -> None:
        bench = Bench(max_executing=4)
        bench.seal(bench.control.take("w", 4))
        a = bench.control.acquire("update", "weights", 1, 10.0)
        b = bench.control.acquire("checkpoint", "capture", 1, 10.0)
        assert (a.epoch, b.epoch) == (1, 2)
        for hold in (a, b):
            assert bench.control.take("w", 10) == []
            assert "hold" in waits(bench)
            bench.control.admission.release(hold.hold)
            bench.control.admission.release(hold.hold)
        assert len(bench.control.take("w", 10)) == 4
        assert bench.control.try_lease().lease.lease == 1

    def test_the_frontier_is_what_executes_now_and_ends_with_durable_publication(self) -> None:
        bench = Bench()
        taken = bench.control.take("w", 4)
        bench.control.report(bench.report_of(taken[:1]))
        hold = bench.control.acquire("u", "p", 1, 10.0)
        assert set(bench.control.admission.still_open(hold.hold)) == set(bench.control.scheduler.active) | {
            taken[0].identity
        }
        still = bench.control.admission.still_open
        assert taken[0].identity in still(hold.hold)
        bench.flush()
        assert taken[0].identity not in still(hold.hold)
        for identity in list(bench.control.scheduler.active):
            bench.control.results.abandon(identity, Outcome.ABORTED, "")
        assert still(hold.hold) == ()

    def test_an_execution_that_failed_has_ended_too_and_its_retry_is_not_in_the_frontier(self) -> None:
        bench = Bench(max_executing=2)
        taken = bench.control.take("w", 2)
        hold = bench.control.acquire("u", "p", 1, 10.0)
        bench.fail(taken[0])
        bench.seal(taken[1:])
        assert bench.control.admission.still_open(hold.hold) == ()

    def test_a_hold_whose_owner_is_silent_expires_and_effects_under_it_are_refused(self) -> None:
        bench = Bench()
        hold = bench.control.acquire("u", "p", 1, 10.0)
        bench.clock.advance(9.0)
        bench.control.admission.renew(hold.hold, hold.epoch)
        bench.clock.advance(9.0)
        assert bench.control.expire() == []
        bench.clock.advance(2.0)
        assert [expired.hold for expired in bench.control.expire()] == [hold.hold]
        with pytest.raises(HoldRefused):
            bench.control.admission.confirm(hold.hold, hold.epoch)
        assert bench.control.admission.is_open

    def test_effects_name_the_epoch_of_their_hold(self) -> None:
        bench = Bench()
        hold = bench.control.acquire("u", "p", 1, 10.0)
        with pytest.raises(HoldRefused):
            bench.control.admission.confirm(hold.hold, hold.epoch + 1)
        bench.control.admission.confirm(hold.hold, hold.epoch)

    def test_close_dominates(self) -> None:
        bench = Bench()
        hold = bench.control.acquire("u", "p", 1, 10.0)
        bench.control.admission.close("the end")
        assert bench.control.admission.release(hold.hold) is False
        assert not bench.control.admission.is_open
        assert "the end" in bench.control.admission.why_closed()

    def test_a_dead_drivers_holds_are_released_together(self) -> None:
        bench = Bench()
        mine = [bench.control.acquire("u", "p", 1, 10.0).hold for _ in range(2)]
        other = bench.control.acquire("eval", "p", 2, 10.0)
        assert bench.control.admission.release_token(1) == mine
        assert not bench.control.admission.is_open
        bench.control.admission.release(other.hold)
        assert bench.control.admission.is_open

    def test_a_checkpoint_needs_a_hold_and_no_open_lease(self) -> None:
        bench = Bench()
        bench.seal(bench.control.take("w", 8))
        bench.control.try_lease()
        hold = bench.control.acquire("u", "p", 1, 10.0)
        with pytest.raises(HoldRefused, match="lease 1 is open"):
            bench.control.prepare_checkpoint(hold.hold, hold.epoch)
        bench.control.leasing.roll_back(1, "x")
        bench.control.prepare_checkpoint(hold.hold, hold.epoch)
        bench.control.admission.release(hold.hold)
        with pytest.raises(HoldRefused):
            bench.control.prepare_checkpoint(hold.hold, hold.epoch)

    def test_ten_thousand_live_executions_do_not_slow_a_hold(self) -> None:
        bench = Bench(staleness=None, max_executing=10_000, max_completed=5_000, max_retained=5_000)
        assert len(bench.control.take("w", 10_000)) == 10_000
        hold = bench.control.acquire("u", "p", 1, 10.0)
        assert hold.frontier == 10_000
        bench.control.admission.release(hold.hold)


class TestTurns:
    def test_an_attempt_goes_on_from_the_last_durable_turn_of_a_dead_one(self) -> None:
        bench = Bench()
        dispatch = bench.control.take("w", 1)[0]
        bench.control.report(bench.turn_of(dispatch, 0, 0))
        bench.control.lose_worker("w")
        again = bench.control.take("w2", 1)[0]
        assert again.identity == Identity(0, 0, 1, 1)
        assert again.boundary == 1
        assert again.continuation.at.turn == 0
        assert again.continuation.at.state == b"state"
        assert set(again.continuation.hot) == set(again.continuation.blocks)

    def test_a_continuation_survives_a_crash_of_the_manager(self) -> None:
        bench = Bench()
        dispatch = bench.control.take("w", 1)[0]
        bench.control.report(bench.turn_of(dispatch, 0, 0))
        bench.flush()
        bench.restart()
        bench.activate()
        again = next(d for d in bench.control.take("w", 100) if (d.identity.group, d.identity.sibling) == (0, 0))
        assert again.continuation is not None
        assert again.continuation.hot == {}, "the bytes are read from the journal"
        bench.seal([again])
        assert bench.control.ledger.groups[0].rollouts[0].rows == ((("1-w-1", 0)), ("2-w-2", 0))

    def test_a_turn_that_comes_twice_or_too_late_changes_nothing(self) -> None:
        bench = Bench()
        dispatch = bench.control.take("w", 1)[0]
        turn = bench.turn_of(dispatch, 0, 0)
        assert bench.control.report(turn).accepted == 1
        assert bench.control.report(turn).accepted == 0
        bench.control.lose_worker("w")
        assert bench.control.report(bench.turn_of(dispatch, 1, 1)).accepted == 0

    def test_the_oldest_token_of_any_turn_decides_the_staleness(self) -> None:
        bench = Bench(batch=1, staleness=3, max_executing=100, max_completed=10, max_retained=10)
        taken = bench.control.take("w", 4)
        bench.control.report(bench.turn_of(taken[0], 0, 0))
        bench.seal(taken[2:4])
        bench.train()
        bench.control.lose_worker("w")
        again = [d for d in bench.control.take("w", 100) if d.identity.group == 0]
        bench.seal(again, version=1)
        assert bench.control.ledger.groups[0].oldest == 0


def test_a_policy_is_published_once_per_version_and_incarnation() -> None:
    bench = Bench()
    seq = bench.writer.last_seq
    bench.control.publish_policy(bench.digest())
    assert bench.writer.last_seq == seq


def test_status_names_what_each_component_waits_for() -> None:
    bench = Bench()
    hold = bench.control.acquire("flow", "update_weights", 1, 10.0)
    status = bench.control.status()
    assert "hold 1 of flow for update_weights" in str(status["submission_waits_for"])
    assert status["holds"][0]["owner"] == "flow"
    bench.control.admission.release(hold.hold)

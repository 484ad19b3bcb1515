"""Every transition that the state machine does not allow is refused by name, and changes nothing."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import schema
from storage.errors import LedgerInvalid, TidegateError
from storage.intervals import IntervalSet
from storage.ledger import Ledger
from storage.schema import Record
from storage.transitions import apply

CLAIM = schema.RunClaimed(1, "o", "r")
POLICY = schema.PolicyPublished(1, 0, "w0", "")
RESERVE = schema.GroupReserved(0, 2)
BLOCK = schema.PayloadStored("b", "d", 3, True)


def mint(group: int = 0, siblings: tuple[int, ...] = (0, 1), attempt: int = 0, boundary: int = -1) -> Record:
    n = len(siblings)
    return schema.AttemptsMinted(group, siblings, (attempt,) * n, (boundary,) * n, 0)


def seal(group: int = 0, siblings: tuple[int, ...] = (0, 1), attempt: int = 0, **changes: object) -> Record:
    n = len(siblings)
    made = schema.Sealed("b", (group,) * n, siblings, (attempt,) * n, tuple(range(n)), (1,) * n, (1,) * n,
                         (0,) * n, (1.0,) * n)  # fmt: skip
    return msgspec.structs.replace(made, **changes)


DISPATCH = schema.GroupsDispatched(0, 2, 2, 0)
ABANDON = schema.AttemptAbandoned(0, 0, 0, "failed", "")
COMPLETE = schema.GroupCompleted((0,))
LEASE = schema.LeaseIssued(1, 1, (0,), 0, False)
COMMIT = schema.StepCommitted(1, 1, "s1", "w1", {})
DUE = schema.EvaluationDue(1, ("a", "b"))
SEALED = [CLAIM, POLICY, RESERVE, mint(), BLOCK, seal()]
LEASED = [*SEALED, COMPLETE, LEASE]
COMMITTED = [*LEASED, COMMIT]
SERVED = [*COMMITTED, schema.PolicyPublished(1, 1, "w1", "w0")]


def done(suite: str = "a", **changes: object) -> Record:
    made = schema.EvaluationDone(suite, 1, "w1", False, 1, 1, 2, 4, 1, {"reward_mean": 0.5})
    return msgspec.structs.replace(made, **changes)


DISCARDED = [*COMMITTED, schema.GroupDiscarded((1,), "x")]


def fold(records: list[Record], n: int = 2) -> Ledger:
    ledger = Ledger(n)
    for seq, record in enumerate(records):
        apply(ledger, seq, record)
    return ledger


@pytest.mark.parametrize(
    ("before", "record", "says"),
    [
        ([], RESERVE, "claim as the first record"),
        ([CLAIM], schema.RunClaimed(1, "o", "r"), "incarnation 2"),
        ([CLAIM], schema.RunClaimed(3, "o", "r"), "incarnation 2"),
        ([CLAIM], schema.GroupReserved(1, 1), "ordinals from 0"),
        ([CLAIM], schema.GroupReserved(0, 0), "ordinals from 0"),
        ([CLAIM, RESERVE], RESERVE, "ordinals from 2"),
        ([CLAIM], schema.PolicyPublished(2, 0, "w", ""), r"version \(1, 0\)"),
        ([CLAIM], schema.PolicyPublished(1, 1, "w", ""), r"version \(1, 0\)"),
        ([CLAIM, POLICY], schema.PolicyPublished(1, 0, "w0", "other"), "after 'w0'"),
        ([CLAIM, POLICY], schema.PolicyPublished(1, 0, "wX", "w0"), "weights w0"),
        ([CLAIM], mint(), "never reserved"),
        ([CLAIM, RESERVE], mint(siblings=(0, 0)), "distinct siblings"),
        ([CLAIM, RESERVE], mint(siblings=(2,)), r"0\.\.1"),
        ([CLAIM, RESERVE], mint(siblings=()), "reserved or generating"),
        ([CLAIM, RESERVE], mint(attempt=1), "attempt 0"),
        ([CLAIM, RESERVE], mint(boundary=0), "its last boundary -1"),
        ([CLAIM, RESERVE], schema.AttemptsMinted(0, (0, 1), (0,), (-1, -1), 0), "one attempt"),
        ([CLAIM, RESERVE, mint()], mint(attempt=1), "waiting"),
        ([CLAIM], schema.GroupsDispatched(0, 1, 2, 0), "never reserved"),
        ([CLAIM, RESERVE], schema.GroupsDispatched(0, 0, 2, 0), "at least one group"),
        ([CLAIM, RESERVE], schema.GroupsDispatched(0, 1, 3, 0), "at least one group of 2"),
        ([CLAIM, RESERVE], schema.GroupsDispatched(1, 2, 2, 0), "never reserved"),
        ([CLAIM, RESERVE, mint(1)], schema.GroupsDispatched(0, 2, 2, 0), "fresh groups"),
        ([CLAIM, RESERVE, DISPATCH], DISPATCH, "fresh groups"),
        ([CLAIM, RESERVE, DISPATCH], mint(attempt=1), "waiting"),
        ([CLAIM, RESERVE, mint(siblings=(0,)), ABANDON], schema.GroupsDispatched(0, 1, 2, 0), "fresh groups"),
        ([CLAIM, RESERVE, mint()], schema.AttemptAbandoned(0, 0, 1, "failed", ""), "live at attempt 1"),
        ([CLAIM, RESERVE, BLOCK], seal(), "live at attempt 0"),
        ([CLAIM, RESERVE, mint()], seal(), "payload_stored record before it"),
        ([CLAIM, RESERVE, mint(), BLOCK], seal(attempt=1), "live at attempt 1"),
        ([CLAIM, RESERVE, mint(), BLOCK], seal(rewards=(1.0, float("nan"))), "finite reward"),
        ([CLAIM, RESERVE, mint(), BLOCK], seal(siblings=(0, 0)), "each rollout once"),
        ([CLAIM, RESERVE, mint(), BLOCK], seal(rows=(0,)), "equal, non-empty columns"),
        ([CLAIM, RESERVE, mint(), BLOCK], seal(rows=(1, 1)), "each row of the block once"),
        ([*SEALED], seal(), "live at attempt 0"),
        ([*SEALED], BLOCK, "new block name"),
        ([CLAIM, RESERVE, mint(), BLOCK, seal(siblings=(0,))], COMPLETE, "generating with 2"),
        ([CLAIM, RESERVE], schema.GroupRequeued(0, "x"), "dispatched, completed or waiting"),
        ([CLAIM, RESERVE, mint()], schema.GroupRequeued(0, "x"), "dispatched, completed or waiting"),
        ([CLAIM, RESERVE, mint()], schema.GroupQuarantined(0, "x"), "no live attempt"),
        ([CLAIM], schema.QuarantineReleased(0), "a quarantined group"),
        ([*SEALED], LEASE, "completed"),
        ([*SEALED, COMPLETE], schema.LeaseIssued(2, 1, (0,), 0, False), "lease 1 of step 1"),
        ([*SEALED, COMPLETE], schema.LeaseIssued(1, 2, (0,), 0, False), "lease 1 of step 1"),
        ([*SEALED, COMPLETE], schema.LeaseIssued(1, 1, (0,), 1, False), "at version 0"),
        ([*SEALED, COMPLETE], schema.LeaseIssued(1, 1, (0, 0), 0, False), "distinct groups"),
        ([*SEALED, COMPLETE], schema.LeaseIssued(1, 1, (), 0, False), "distinct groups"),
        (LEASED, schema.LeaseIssued(2, 1, (0,), 0, False), "no open lease"),
        (LEASED, schema.GroupDiscarded((0,), "x"), "no lease holds"),
        ([*SEALED], schema.GroupDiscarded((0, 0), "x"), "distinct groups"),
        ([*SEALED], schema.GroupCompleted((0, 0)), "distinct groups"),
        (LEASED, schema.GroupRequeued(0, "x"), "dispatched, completed or waiting"),
        (LEASED, schema.StepCommitted(1, 2, "s", "w", {}), "lease 2 to be open"),
        (LEASED, schema.StepCommitted(2, 1, "s", "w", {}), "the lease's step"),
        (LEASED, schema.LeaseRolledBack(2, "x"), "lease 2 to be open"),
        (COMMITTED, COMMIT, "lease 1 to be open"),
        (COMMITTED, schema.LeaseRolledBack(1, "x"), "lease 1 to be open"),
        (COMMITTED, mint(), "consumed"),
        (COMMITTED, schema.GroupDiscarded((0,), "x"), "consumed"),
        (COMMITTED, schema.StepRedone(2, "s", "w", True), "a committed step"),
        (COMMITTED, schema.StepRedone(1, "s1", "w1", False), "the comparison"),
        (COMMITTED, schema.CheckpointPublished(2, 8, "m", "d", 1, 1), "a committed step"),
        (COMMITTED, schema.CheckpointPublished(1, 7, "m", "d", 1, 1), "position of its commit"),
        (COMMITTED, schema.RunFinished("x"), "every group settled"),
        ([CLAIM, schema.RunFinished("x")], RESERVE, "only claims"),
        ([CLAIM], schema.EvaluationDue(0, ("a",)), "committed last"),
        (COMMITTED, schema.EvaluationDue(2, ("a",)), "step 1, committed last"),
        (COMMITTED, schema.EvaluationDue(1, ()), "distinct suites"),
        (COMMITTED, schema.EvaluationDue(1, ("a", "a")), "distinct suites"),
        ([*COMMITTED, DUE], schema.EvaluationDue(1, ("c", "b")), "once"),
        ([*SERVED, DUE, done()], schema.EvaluationDue(1, ("a",)), "once"),
        (SERVED, done(), "never due"),
        ([*SERVED, DUE], done("c"), "never due"),
        ([*SERVED, DUE, done()], done(), "done already"),
        ([*SERVED, DUE, done()], done(digest="w2"), "done already"),
        ([*SERVED, DUE], done(failed=5), "5 of 4 samples failed"),
        ([*SERVED, DUE], done(tasks=-1), "counts"),
        ([*SERVED, DUE], done(metrics={"reward_mean": float("nan")}), "finite metrics"),
        ([*SERVED, DUE], done(newest=2, mixed=True), "published ones up to 1"),
        ([*SERVED, DUE], done(oldest=1, newest=0, mixed=True), "published ones up to 1"),
        ([*SERVED, DUE], done(failed=4), "-1 without any reward"),
        ([*SERVED, DUE], done(oldest=0), "mixed=False"),
        ([*SERVED, DUE], done(mixed=True), "mixed=True"),
        ([*DISCARDED, schema.EvaluationDue(1, ("a",))], schema.RunFinished("x"), "1 evaluations are due"),
    ],
)
def test_illegal_transitions_are_refused_by_name_and_change_nothing(
    before: list[Record], record: Record, says: str
) -> None:
    ledger, untouched = fold(before), fold(before)
    with pytest.raises(TidegateError, match=says) as caught:
        apply(ledger, len(before), record)
    assert f"record {len(before)}" in str(caught.value)
    assert repr(ledger) == repr(untouched)  # by text: the NaN of an open reward is not equal to itself


def test_a_burst_of_fresh_groups_is_what_one_mint_for_each_of_them_would_be() -> None:
    one = fold([CLAIM, POLICY, RESERVE, DISPATCH])
    other = fold([CLAIM, POLICY, RESERVE, mint(0), mint(1)])
    assert one.groups == other.groups
    assert (one.live, one.dispatched, one.totals, one.oldest_counts) == (
        other.live, other.dispatched, +other.totals, other.oldest_counts
    )  # fmt: skip
    assert one.counts["rollouts_minted"] == other.counts["rollouts_minted"] == 4


def test_a_hole_in_the_sequence_is_refused() -> None:
    with pytest.raises(LedgerInvalid, match="record 1"):
        apply(fold([CLAIM]), 2, RESERVE)


def test_a_whole_life_settles_the_group_and_keeps_what_a_redo_needs() -> None:
    ledger = fold(COMMITTED)
    assert list(ledger.consumed) == [0]
    assert list(ledger.groups) == [1]
    assert ledger.steps[1].lease.groups[0].rows == ((("b", 0),), (("b", 1),))
    assert ledger.blocks["b"].retained == 2
    assert ledger.idle_blocks == ["b"]


def test_a_claim_closes_live_attempts_and_keeps_sealed_ones() -> None:
    ledger = fold([CLAIM, RESERVE, mint(), BLOCK, seal(siblings=(0,)), schema.RunClaimed(2, "o", "r")])
    first, second = ledger.groups[0].rollouts
    assert (first.state.value, second.state.value) == ("sealed", "waiting")
    assert (ledger.counts["rollouts_reused"], ledger.counts["attempts_closed_by_claim"]) == (1, 1)
    apply(ledger, 6, mint(siblings=(1,), attempt=1))
    assert ledger.counts["rollouts_regenerated"] == 1


def test_quarantine_and_release_go_on_with_new_attempt_numbers() -> None:
    ledger = fold([CLAIM, RESERVE, mint(siblings=(0,)), schema.AttemptAbandoned(0, 0, 0, "failed", ""),
                   schema.GroupQuarantined(0, "bad"), schema.QuarantineReleased(0)])  # fmt: skip
    assert ledger.groups[0].rollouts[0].attempt == 0
    apply(ledger, 6, schema.AttemptsMinted(0, (0, 1), (1, 0), (-1, -1), 0))


def test_an_evaluation_is_due_until_its_result_and_a_claim_changes_nothing_of_it() -> None:
    ledger = fold([*SERVED, DUE, done("b"), schema.RunClaimed(2, "o", "r")])
    assert (list(ledger.due), ledger.evaluated) == ([("a", 1)], {("b", 1)})
    none = done(digest="w0", oldest=-1, newest=-1, tasks=0, samples=0, failed=0, metrics={})
    apply(ledger, ledger.next_seq, none)
    assert (list(ledger.due), ledger.evaluated) == ([], {("a", 1), ("b", 1)})


def test_a_redone_step_that_differs_becomes_the_state_of_the_run() -> None:
    ledger = fold([*COMMITTED, schema.RunClaimed(2, "o", "r"), schema.StepRedone(1, "sX", "wX", False)])
    assert (ledger.state_digest, ledger.weights_digest, ledger.counts["steps_diverged"]) == ("sX", "wX", 1)
    apply(ledger, 11, schema.PolicyPublished(2, 1, "wX", "w0"))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30))))
def test_an_interval_set_is_a_set(operations: list[tuple[bool, int]]) -> None:
    mine, reference = IntervalSet(), set[int]()
    for add, value in operations:
        if add:
            assert mine.add(value) == (value not in reference)
            reference.add(value)
        else:
            assert mine.remove(value) == (value in reference)
            reference.discard(value)
        assert list(mine) == sorted(reference)
        assert len(mine) == len(reference)
        assert all((v in mine) == (v in reference) for v in range(32))
        starts = mine.intervals()
        assert all(end < start for (_, end), (start, _) in pairwise(starts))

"""Committed steps that are taken back: what the ledger is then, what is refused, and what verify says of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage import schema
from storage.errors import TidegateError
from storage.ledger import Ledger
from storage.schema import Record
from storage.snapshot import ledger_rows, rebuild
from storage.transitions import apply
from tests.storage.test_ledger import fold

PUBLISHED = schema.CheckpointPublished(1, 0, "m", "d", 1, 1)
CLAIM_AGAIN = schema.RunClaimed(2, "o", "r")


def group(ordinal: int, attempt: int = 0) -> list[Record]:
    """A group of two is generated at the version of its step and completed."""
    block, both = f"b{ordinal}-{attempt}", (ordinal,) * 2
    return [
        schema.AttemptsMinted(ordinal, (0, 1), (attempt,) * 2, (-1, -1), ordinal),
        schema.PayloadStored(block, "d", 3, True),
        schema.Sealed(block, both, (0, 1), (attempt,) * 2, (0, 1), (1, 1), (5, 5), both, (1.0, 0.0)),
        schema.GroupCompleted((ordinal,)),
    ]  # fmt: skip


def step(number: int, parent: str) -> list[Record]:
    """Step n trains group n - 1, whose weights are published."""
    return [
        *group(number - 1),
        schema.LeaseIssued(number, number, (number - 1,), number - 1, False),
        schema.StepCommitted(number, number, f"s{number}", f"w{number}", {}),
        schema.PolicyPublished(1, number, f"w{number}", parent),
    ]


START: list[Record] = [
    schema.RunClaimed(1, "o", "r"), schema.PolicyPublished(1, 0, "w0", ""), schema.GroupReserved(0, 6)
]  # fmt: skip
ONE = [*START, *step(1, "w0")]


def three(*, checkpoint: bool = True) -> list[Record]:
    """Three steps, a checkpoint of the first; group 3 is completed, group 4 has a live attempt and a sealed one, an
    evaluation of step 1 is done, those of step 3 are done and due. Then the next incarnation."""
    position = len(ONE) - 2
    saved: list[Record] = [schema.CheckpointPublished(1, position, "m", "d", 1, 1)] if checkpoint else []
    done = schema.EvaluationDone("a", 1, "w1", False, 1, 1, 1, 1, 0, {})
    return [
        *ONE, schema.EvaluationDue(1, ("a",)), done, *saved, *step(2, "w1"), *step(3, "w2"), *group(3),
        schema.EvaluationDue(3, ("a", "b")),
        schema.EvaluationDone("a", 3, "w3", False, 3, 3, 1, 1, 0, {}),
        schema.AttemptsMinted(4, (0, 1), (0, 0), (-1, -1), 3),
        schema.PayloadStored("b4", "d", 3, True),
        schema.Sealed("b4", (4,), (0,), (0,), (0,), (1,), (5,), (3,), (1.0,)),
        CLAIM_AGAIN,
    ]  # fmt: skip


REVERT = schema.StepsReverted(3, 1, "s1", "w1")
TO_GENESIS = schema.StepsReverted(3, 0, "", "")


def test_the_run_is_where_the_checkpoint_is_and_later_work_starts_whole() -> None:
    ledger = fold([*three(), REVERT])
    assert (ledger.step, ledger.state_digest, ledger.weights_digest) == (1, "s1", "w1")
    assert (list(ledger.steps), [found.step for found in ledger.checkpoints]) == ([1], [1])
    assert list(ledger.consumed) == [0]
    assert list(ledger.groups) == [1, 2, 3, 4, 5], "in the order of the source"
    assert ledger.state_counts() == {"reserved": 5, "generating": 0, "completed": 0, "leased": 0}
    assert not any(rollout.rows for one in ledger.groups.values() for rollout in one.rollouts)
    assert not ledger.oldest_counts
    assert list(ledger.blocks) == ["b0-0"], "only what a redo may need"
    assert (ledger.due, ledger.evaluated) == ({}, {("a", 1)}), "those of later steps are due when they come again"
    assert ledger.counts["groups_reverted"] == 2
    assert ledger.missing_ordinals() == []


def test_without_a_checkpoint_it_goes_back_to_the_initial_weights() -> None:
    ledger = fold([*three(checkpoint=False), TO_GENESIS])
    assert (ledger.step, ledger.state_digest, ledger.weights_digest) == (0, "", "")
    assert not ledger.steps
    assert not ledger.consumed
    apply(ledger, ledger.next_seq, schema.PolicyPublished(2, 0, "w0", "w3"))


def test_attempts_go_on_and_the_steps_come_again_under_versions_of_the_new_incarnation() -> None:
    ledger = fold([*three(), REVERT])
    with pytest.raises(TidegateError, match="attempt 1"):
        apply(ledger, ledger.next_seq, schema.AttemptsMinted(1, (0, 1), (0, 0), (-1, -1), 1))
    again: list[Record] = [
        schema.PolicyPublished(2, 1, "w1", "w3"),
        *group(1, attempt=1),
        schema.LeaseIssued(4, 2, (1,), 1, False),
        schema.StepCommitted(2, 4, "s2b", "w2b", {}),
        schema.PolicyPublished(2, 2, "w2b", "w1"),
        schema.EvaluationDue(2, ("a",)),
    ]
    for record in again:
        apply(ledger, ledger.next_seq, record)
    assert (ledger.step, list(ledger.consumed), ledger.state_digest) == (2, [0, 1], "s2b")


def test_a_ledger_with_reverted_steps_is_the_same_after_it_was_written_down_and_read() -> None:
    ledger = fold([*three(), REVERT])
    other = rebuild(ledger_rows(ledger))
    assert ledger_rows(other) == ledger_rows(ledger)
    for derived in ("totals", "live", "dispatched", "oldest_counts", "completed", "blocks"):
        assert (getattr(other, derived) or {}) == (getattr(ledger, derived) or {}), derived
    lease = rebuild(ledger_rows(fold(three()))).steps[3].lease
    assert (lease.groups[0].attempts, lease.groups[0].boundaries) == ((0, 0), (0, 0))


@pytest.mark.parametrize(
    ("before", "record", "says"),
    [
        (lambda: three(), schema.StepsReverted(2, 1, "s1", "w1"), "steps up to 3"),
        (lambda: three(), schema.StepsReverted(4, 1, "s1", "w1"), "steps up to 3"),
        (lambda: three(), schema.StepsReverted(3, 3, "s3", "w3"), "steps up to 3"),
        (lambda: three(), schema.StepsReverted(3, -1, "", ""), "steps up to 3"),
        (lambda: three(), schema.StepsReverted(3, 2, "s2", "w2"), r"one of \[0, 1\]"),
        (lambda: three(), schema.StepsReverted(3, 1, "", ""), "those of a checkpoint"),
        (lambda: three(), schema.StepsReverted(3, 0, "s0", "w0"), 'or "" for the initial weights'),
        (lambda: three()[:-1], REVERT, "has not published a version yet"),
        (lambda: [*three(), schema.PolicyPublished(2, 3, "w3", "w3")], REVERT, "has not published a version yet"),
        (
            lambda: [*three(), schema.AttemptsMinted(5, (0, 1), (0, 0), (-1, -1), 3)],
            REVERT,
            "incarnation 2 at work, 2 live attempts",
        ),
        (lambda: [*three(), schema.LeaseIssued(4, 4, (3,), 3, False)], REVERT, "no open lease"),
        (lambda: [*START, schema.GroupDiscarded((0, 1, 2, 3, 4, 5), "x"), schema.RunFinished("x"), CLAIM_AGAIN],
         schema.StepsReverted(1, 0, "", ""), "only claims"),
    ],
)  # fmt: skip
def test_what_is_no_return_to_a_state_that_can_be_restored_is_refused_and_changes_nothing(
    before: Callable[[], list[Record]], record: Record, says: str
) -> None:
    ledger, untouched = fold(before()), fold(before())
    with pytest.raises(TidegateError, match=says):
        apply(ledger, ledger.next_seq, record)
    assert repr(ledger) == repr(untouched)


def test_once_a_checkpoint_has_left_the_initial_weights_are_no_base() -> None:
    records = list(ONE)
    for number in range(2, 6):
        position = next(
            seq for seq, r in enumerate(records) if isinstance(r, schema.StepCommitted) and r.step == number - 1
        )
        published = schema.CheckpointPublished(number - 1, position, f"m{number - 1}", "d", 1, 1)
        records += [published, *step(number, f"w{number - 1}")]
    records.append(schema.Retired(("m1",), (), ()))
    ledger: Ledger = fold([*records, CLAIM_AGAIN])
    assert [found.step for found in ledger.checkpoints] == [2, 3, 4]
    with pytest.raises(TidegateError, match=r"one of \[2, 3, 4\]"):
        apply(ledger, ledger.next_seq, schema.StepsReverted(5, 0, "", ""))
    apply(ledger, ledger.next_seq, schema.StepsReverted(5, 2, "s2", "w2"))
    assert ([found.step for found in ledger.checkpoints], list(ledger.steps)) == ([2], [])

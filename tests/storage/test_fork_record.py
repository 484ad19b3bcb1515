"""The record of a fork: what the state machine allows, and how a ledger goes on from it."""

from __future__ import annotations

import msgspec
import pytest

from storage import schema
from storage.errors import (
    LedgerInvalid,
)
from storage.ledger import RESERVED, Ledger
from storage.restore import plan_restore
from storage.s3_location import without_credentials
from storage.snapshot import ledger_rows, rebuild
from storage.transitions import apply
from tests.storage.forking import NEW

CLAIM = schema.RunClaimed(1, "fork of a@3", "fork")
COPIED = schema.CheckpointPublished(3, 1, "m", "d", 10, 10)
FORKED = schema.Forked(
    "a", "file:///x", 3, 40, "s3", "w3", COPIED, 8, ((0, 2), (3, 4)), ((4, 5),), (6,), ("failed",), ((2, 1),),
    ((0, 3),), "sibling", "f",
)  # fmt: skip


def changed(**changes: object) -> schema.Forked:
    return msgspec.structs.replace(FORKED, **changes)


def folded(*records: schema.Record) -> Ledger:
    ledger = Ledger(2)
    for seq, record in enumerate(records):
        apply(ledger, seq, record)
    return ledger


@pytest.mark.parametrize(
    ("before", "record", "says"),
    [
        ([], FORKED, "a claim as the first record"),
        ([CLAIM, schema.GroupReserved(0, 1)], FORKED, "the first record after the first claim"),
        ([CLAIM, FORKED], FORKED, "the first record after the first claim"),
        ([CLAIM, schema.RunClaimed(2, "o", "r")], FORKED, "the first record after the first claim"),
        ([CLAIM], changed(step=4), "a checkpoint of its step"),
        ([CLAIM], changed(step=0, checkpoint=msgspec.structs.replace(COPIED, step=0)), "at least 1"),
        ([CLAIM], changed(checkpoint=msgspec.structs.replace(COPIED, position=40)), "at record 1"),
        ([CLAIM], changed(consumed=((3, 4), (0, 2))), "intervals in order"),
        ([CLAIM], changed(consumed=((2, 2),)), "intervals in order"),
        ([CLAIM], changed(discarded=((1, 3),)), "in at most one place"),
        ([CLAIM], changed(quarantined=(3,)), "in at most one place"),
        ([CLAIM], changed(quarantined=(8,)), "beyond the frontier 8"),
        ([CLAIM], changed(frontier=5), "beyond the frontier 5"),
        ([CLAIM], changed(consumed=((-1, 2),)), "ordinal -1"),
        ([CLAIM], changed(reasons=()), "for each a reason"),
        ([CLAIM], changed(attempts=((1,),)), "attempts and boundaries of 2"),
    ],
)
def test_a_fork_that_the_state_machine_does_not_allow_is_refused_and_changes_nothing(
    before: list[schema.Record], record: schema.Record, says: str
) -> None:
    ledger = folded(*before)
    rows = ledger_rows(ledger)
    with pytest.raises(LedgerInvalid) as refused:
        apply(ledger, ledger.next_seq, record)
    assert says in str(refused.value)
    assert ledger_rows(ledger) == rows


def test_a_forked_ledger_goes_on_with_the_next_step_and_the_next_ordinal() -> None:
    ledger = folded(CLAIM, FORKED)
    assert list(ledger.groups) == [2, 5, 7]
    assert {group.state for group in ledger.groups.values()} == {RESERVED}
    assert (len(ledger.consumed), len(ledger.discarded), list(ledger.quarantined)) == (3, 1, [6])
    assert ledger.missing_ordinals() == []
    assert ledger_rows(rebuild(ledger_rows(ledger))) == ledger_rows(ledger)
    for record in (
        schema.RunClaimed(2, "o", "r"),
        schema.PolicyPublished(2, 3, "w3", ""),
        schema.GroupReserved(8, 1),
        schema.GroupsDispatched(7, 1, 2, 3),
        schema.PayloadStored("p", "d", 1, True),
        schema.Sealed("p", (7, 7), (0, 1), (0, 0), (0, 1), (1, 1), (1, 1), (3, 3), (1.0, 0.0)),
        schema.GroupCompleted((7,)),
        schema.LeaseIssued(1, 4, (7,), 3, False),
        schema.StepCommitted(4, 1, "s4", "w4", {}),
        schema.CheckpointPublished(4, 10, "m4", "d4", 1, 1),
    ):
        apply(ledger, ledger.next_seq, record)
    assert [record.step for record in ledger.checkpoints] == [3, 4]
    assert not plan_restore(ledger, NEW).genesis, "the initial weights are nobody's base any more"
    apply(ledger, ledger.next_seq, schema.QuarantineReleased(6))
    assert [rollout.attempt for rollout in ledger.groups[6].rollouts] == [2, 1], "attempt numbers go on"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (schema.PolicyPublished(1, 0, "w3", ""), r"version (1, 3)"),
        (schema.PolicyPublished(1, 3, "w0", ""), "weights w3"),
        (schema.GroupReserved(0, 1), "ordinals from 8"),
        (schema.LeaseIssued(1, 1, (2,), 0, False), "lease 1 of step 4"),
    ],
)
def test_a_forked_ledger_does_not_begin_again(record: schema.Record, says: str) -> None:
    ledger = folded(CLAIM, FORKED)
    with pytest.raises(LedgerInvalid) as refused:
        apply(ledger, 2, record)
    assert says in str(refused.value)


def test_the_url_in_a_record_names_no_source_of_credentials() -> None:
    url = "s3://bucket/runs?endpoint=http://10.0.0.5:8333&region=us-east-1"
    assert without_credentials(f"{url}&credentials=prefect:NAME") == url
    assert without_credentials("file:///data/runs?credentials=x") == "file:///data/runs?credentials=x"

"""What may follow what inside a rollout: turns, answers that are acted on, requests, exports, and turns given up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from storage import schema
from storage.errors import (
    ContinuationInvalid,
    IllegalTransition,
    LineageInvalid,
    ReferenceInvalid,
    ResourceInvalid,
    TidegateError,
    TwoOwners,
)
from storage.ledger import Boundary, Export, Ledger, Requested
from storage.schema import Record
from storage.snapshot import ledger_rows, rebuild
from storage.transitions import apply
from tests.storage.test_ledger import BLOCK, CLAIM, POLICY, RESERVE, fold, mint, seal

ANSWER = schema.ModelAnswered(0, 0, 0, 0, 0, 0, "b", 0, 0, 5, 0)
INTENT = schema.RequestIntent(0, 0, 0, 0, 0, "box", 0, "in")
DONE = schema.RequestResult(0, 0, 0, 0, 0, "box", 1, "in", b"done")
REFUSED = replace(DONE, revision=0, reply=b"no")
READ = schema.RequestResult(0, 0, 0, 0, 0, "map", 0, "look", b"north")
EXPORT = schema.ResourceExported(0, 0, 0, "box", 1, b"all of it")
TURN = schema.TurnCommitted(0, 0, 0, 1, 0, 0, "", -1, 5, 0, 0, b"state", {"box": 1})
PLAIN = schema.TurnCommitted(0, 0, 0, 0, 0, 0, "b", 0, 0, 5, 0, b"state")
GIVEN_UP = schema.ContinuationDiscarded((0,), (0,), "because")
LOST = schema.AttemptAbandoned(0, 0, 0, "worker_lost", "")

STARTED: list[Record] = [CLAIM, POLICY, RESERVE, mint(), BLOCK]
ANSWERED = [*STARTED, ANSWER]
INTENDED = [*ANSWERED, INTENT]
CHANGED = [*INTENDED, DONE]
TURNED = [*CHANGED, EXPORT, TURN]
BETWEEN = [*STARTED, PLAIN]
AGAIN = [*INTENDED, LOST, mint(siblings=(0,), attempt=1, boundary=0)]
"""Attempt 1 goes on with an open request."""


def of(record: Any, **changes: object) -> Record:
    return replace(record, **changes)


def at(records: list[Record]) -> Boundary:
    found = fold(records).groups[0].rollouts[0].boundary
    assert found is not None
    return found


# ---------------------------------------------------------------------- what is allowed


@pytest.mark.parametrize(
    ("records", "index", "pending", "revisions", "replies"),
    [
        (BETWEEN, 0, False, {}, []),
        (ANSWERED, 0, True, {}, []),
        ([*ANSWERED, READ], 0, True, {}, [b"north"]),
        (INTENDED, 0, True, {}, [None]),
        (CHANGED, 0, True, {"box": 1}, [b"done"]),
        ([*INTENDED, REFUSED], 0, True, {}, [b"no"]),
        ([*INTENDED, DONE, of(READ, cursor=1)], 0, True, {"box": 1}, [b"done", b"north"]),
        ([*CHANGED, of(INTENT, cursor=1, revision=1)], 0, True, {"box": 1}, [b"done", None]),
        ([*CHANGED, of(INTENT, cursor=1, resource="pen")], 0, True, {"box": 1}, [b"done", None]),
        ([*CHANGED, EXPORT], 0, True, {"box": 1}, [b"done"]),
        (TURNED, 1, False, {"box": 1}, []),
        ([*CHANGED, of(TURN, block="b", row=1)], 1, False, {"box": 1}, []),
        ([*INTENDED, REFUSED, of(TURN, revisions={})], 1, False, {}, []),
        ([*ANSWERED, of(TURN, revisions={})], 1, False, {}, []),
        ([*ANSWERED, of(TURN, revisions=None)], 1, False, None, []),
        ([*TURNED, of(EXPORT, state=b"once more")], 1, False, {"box": 1}, []),
        ([*TURNED, of(ANSWER, boundary=2, turn=1, row=2, start=5)], 2, True, {"box": 1}, []),
        ([*TURNED, of(ANSWER, boundary=2, turn=1, row=2, sample=1)], 2, True, {"box": 1}, []),
        ([*TURNED, of(PLAIN, boundary=2, turn=1, row=2, start=5, revisions={"box": 1})], 2, False, {"box": 1}, []),
        (AGAIN, 0, True, {}, [None]),
        ([*AGAIN, of(DONE, attempt=1)], 0, True, {"box": 1}, [b"done"]),
        ([*AGAIN, of(DONE, attempt=1), of(TURN, attempt=1)], 1, False, {"box": 1}, []),
    ],
)  # fmt: skip
def test_what_a_rollout_may_do_leads_to_its_next_boundary(
    records: list[Record], index: int, pending: bool, revisions: dict[str, int] | None, replies: list[bytes | None]
) -> None:
    found = at(records)
    assert (found.index, found.pending, [one.reply for one in found.requests]) == (index, pending, replies)
    if revisions is None:
        assert found.revisions is None
    else:
        assert {name: found.revision(name) for name in revisions} == revisions
    assert found.root == 0


def test_an_answer_keeps_the_state_and_the_revisions_from_before_it() -> None:
    assert at(ANSWERED).state == b""
    before, after = at(TURNED), at([*TURNED, of(ANSWER, boundary=2, turn=1, row=2, start=5)])
    assert (after.state, after.revisions, after.exports) == (before.state, {"box": 1}, {"box": Export(1, b"all of it")})
    assert (before.position, after.position) == (5, 10)


def test_a_request_says_which_revisions_it_lies_between() -> None:
    assert at(INTENDED).requests == (Requested("box", "in", 0, 0, None),)
    assert at(CHANGED).requests == (Requested("box", "in", 0, 1, b"done"),)


def test_where_it_is_not_known_what_a_rollout_depends_on_any_revision_may_be_said() -> None:
    unknown = [*ANSWERED, of(TURN, revisions=None), of(ANSWER, boundary=2, turn=1, row=2, start=5)]
    asked = at([*unknown, of(INTENT, boundary=2, revision=7), of(DONE, boundary=2, revision=9)])
    assert asked.revisions is None
    assert asked.revision("box") == 9
    assert at([*unknown, of(TURN, boundary=3, turn=1, start=10, revisions={"box": 4})]).revisions == {"box": 4}


def test_an_answer_is_sealed_with_the_row_of_its_account() -> None:
    ledger = fold([*CHANGED, seal(siblings=(0,), rows=(1,))])
    rollout = ledger.groups[0].rollouts[0]
    assert (rollout.rows, rollout.state.value) == ((("b", 0), ("b", 1)), "sealed")
    assert ledger.blocks["b"].users == 2


def test_a_turn_without_an_account_uses_no_row() -> None:
    assert fold(TURNED).groups[0].rollouts[0].rows == (("b", 0),)
    assert fold([*CHANGED, of(TURN, block="b", row=1)]).groups[0].rollouts[0].rows == (("b", 0), ("b", 1))


def test_turns_that_are_given_up_leave_nothing_but_the_numbers_they_used() -> None:
    ledger = fold([*AGAIN, of(LOST, attempt=1), GIVEN_UP])
    rollout = ledger.groups[0].rollouts[0]
    assert (rollout.boundary, rollout.rows, rollout.boundaries, rollout.attempt) == (None, (), 1, 1)
    assert ledger.counts["rollouts_discarded"] == 1
    assert "b" not in ledger.blocks
    apply(ledger, ledger.next_seq, mint(siblings=(0,), attempt=2))
    apply(ledger, ledger.next_seq, BLOCK)
    apply(ledger, ledger.next_seq, of(ANSWER, attempt=2, boundary=1))
    assert rollout.boundary is not None
    assert (rollout.boundary.root, rollout.boundary.index) == (2, 1)


def test_many_rollouts_are_given_up_at_once() -> None:
    both = [*BETWEEN, of(PLAIN, sibling=1, row=1), schema.RunClaimed(2, "o", "r")]
    ledger = fold([*both, schema.ContinuationDiscarded((0, 0), (0, 1), "because")])
    assert [rollout.boundary for rollout in ledger.groups[0].rollouts] == [None, None]
    assert ledger.groups[0].oldest == -1


# ---------------------------------------------------------------------- what is not


@pytest.mark.parametrize(
    ("before", "record", "kind", "code", "says"),
    [
        # --- answers and turns
        (ANSWERED, ANSWER, ContinuationInvalid, "boundary", "whose answer is being acted on"),
        (ANSWERED, of(ANSWER, boundary=1, turn=1, start=5, row=1), ContinuationInvalid, "boundary", "acted on"),
        (STARTED, of(ANSWER, boundary=1), ContinuationInvalid, "continuation", "boundary 0, turn 0"),
        (STARTED, of(ANSWER, turn=1), ContinuationInvalid, "continuation", "boundary 0, turn 0"),
        (STARTED, of(ANSWER, sample=1), ContinuationInvalid, "continuation", "sample 0"),
        (STARTED, of(ANSWER, row=-1), ContinuationInvalid, "continuation", "in a row"),
        (STARTED, of(PLAIN, row=-1), ContinuationInvalid, "continuation", "in a row"),
        (STARTED, of(ANSWER, start=1), LineageInvalid, "chain", "from position 0"),
        (STARTED, of(ANSWER, tokens=0), LineageInvalid, "chain", "0 tokens"),
        (STARTED, of(PLAIN, start=1), LineageInvalid, "chain", "from position 0"),
        (BETWEEN, of(PLAIN, boundary=1, turn=1, row=1, start=4), LineageInvalid, "chain", "from position 5"),
        (BETWEEN, of(PLAIN, boundary=1, turn=1, row=1, start=5, sample=1), LineageInvalid, "chain", "from position 0"),
        (TURNED, of(ANSWER, boundary=2, turn=1, row=2), LineageInvalid, "chain", "from position 5"),
        (BETWEEN, PLAIN, ContinuationInvalid, "continuation", "boundary 1, turn 1"),
        (BETWEEN, of(ANSWER, boundary=0, turn=1, start=5, row=1), ContinuationInvalid, "continuation", "boundary 1"),
        (STARTED, of(ANSWER, block="other"), ReferenceInvalid, "orphan", "payload_stored"),
        (CHANGED, of(TURN, block="other", row=1), ReferenceInvalid, "orphan", "payload_stored"),
        (STARTED, of(ANSWER, attempt=1), IllegalTransition, "illegal_transition", "live at attempt 1"),
        (STARTED, of(ANSWER, sibling=2), IllegalTransition, "illegal_transition", r"0\.\.1"),
        (STARTED, of(ANSWER, group=7), TwoOwners, "two_owners", "never reserved"),
        (CHANGED, of(TURN, tokens=2), ContinuationInvalid, "continuation", "no more tokens"),
        (CHANGED, of(TURN, turn=1), ContinuationInvalid, "continuation", "turn 0"),
        (CHANGED, of(TURN, sample=1), ContinuationInvalid, "continuation", "sample 0"),
        (CHANGED, of(TURN, boundary=0), ContinuationInvalid, "continuation", "boundary 1"),
        (INTENDED, TURN, ResourceInvalid, "open", "its result first"),
        (CHANGED, of(TURN, revisions={}), ResourceInvalid, "revision", "add up to"),
        (CHANGED, of(TURN, revisions={"box": 2}), ResourceInvalid, "revision", "add up to"),
        (CHANGED, of(TURN, revisions={"box": 1, "pen": 1}), ResourceInvalid, "revision", "add up to"),
        (STARTED, of(PLAIN, revisions={"box": 1}), ResourceInvalid, "revision", "add up to"),
        (TURNED, of(PLAIN, boundary=2, turn=1, row=2, start=5), ResourceInvalid, "revision", "add up to"),
        # --- seals
        (INTENDED, seal(siblings=(0,), rows=(1,)), ResourceInvalid, "open", "its result first"),
        (CHANGED, seal(siblings=(0,), rows=(1,), samples=(2,)), IllegalTransition, "seal", "1 samples"),
        # --- intents
        (STARTED, INTENT, ContinuationInvalid, "continuation", "no boundary"),
        (BETWEEN, INTENT, ContinuationInvalid, "continuation", "boundary 0, complete"),
        (ANSWERED, of(INTENT, boundary=1), ContinuationInvalid, "continuation", "boundary 0, pending"),
        (TURNED, INTENT, ContinuationInvalid, "continuation", "boundary 1, complete"),
        (INTENDED, INTENT, ResourceInvalid, "open", "its result first"),
        (INTENDED, of(INTENT, cursor=1), ResourceInvalid, "open", "its result first"),
        (CHANGED, of(INTENT, revision=1), ContinuationInvalid, "cursor", "action 1 next"),
        (ANSWERED, of(INTENT, cursor=1), ContinuationInvalid, "cursor", "action 0 next"),
        (ANSWERED, of(INTENT, revision=1), ResourceInvalid, "revision", "revision 0"),
        (CHANGED, of(INTENT, cursor=1, revision=0), ResourceInvalid, "revision", "revision 1"),
        (ANSWERED, of(INTENT, attempt=1), IllegalTransition, "illegal_transition", "live at attempt 1"),
        ([*INTENDED, LOST], INTENT, IllegalTransition, "illegal_transition", "waiting at attempt 0"),
        (AGAIN, of(INTENT, attempt=1), ResourceInvalid, "open", "its result first"),
        # --- results
        (STARTED, READ, ContinuationInvalid, "continuation", "no boundary"),
        (BETWEEN, READ, ContinuationInvalid, "continuation", "boundary 0, complete"),
        (ANSWERED, of(READ, cursor=1), ContinuationInvalid, "cursor", "action 0 next"),
        (INTENDED, of(DONE, cursor=1), ContinuationInvalid, "cursor", "action 0 next"),
        (CHANGED, DONE, ContinuationInvalid, "cursor", "action 1 next"),
        (ANSWERED, of(READ, revision=1), ResourceInvalid, "revision", "revision 0"),
        (CHANGED, of(READ, cursor=1, resource="box"), ResourceInvalid, "revision", "revision 1"),
        (INTENDED, of(DONE, digest="other"), ResourceInvalid, "receipt", "as intended"),
        (INTENDED, of(DONE, resource="pen"), ResourceInvalid, "receipt", "as intended"),
        (INTENDED, of(DONE, revision=2), ResourceInvalid, "revision", "revision 0 or 1"),
        ([*CHANGED, of(INTENT, cursor=1, revision=1)], of(DONE, cursor=1, revision=0), ResourceInvalid, "revision",
         "revision 1 or 2"),
        (AGAIN, DONE, IllegalTransition, "illegal_transition", "live at attempt 0"),
        # --- exports
        (STARTED, EXPORT, ContinuationInvalid, "continuation", "a rollout with a boundary"),
        (INTENDED, EXPORT, ResourceInvalid, "revision", "revision 0"),
        (CHANGED, of(EXPORT, revision=2), ResourceInvalid, "revision", "revision 1"),
        (CHANGED, of(EXPORT, revision=0), ResourceInvalid, "revision", "revision 1"),
        (CHANGED, of(EXPORT, attempt=1), IllegalTransition, "illegal_transition", "live at attempt 1"),
        # --- going on, and giving up
        ([*CHANGED, LOST], mint(siblings=(0,), attempt=1), ContinuationInvalid, "lost", "its last boundary 0"),
        ([*TURNED, LOST], mint(siblings=(0,), attempt=1, boundary=0), ContinuationInvalid, "continuation", "its last"),
        ([*CHANGED, LOST, GIVEN_UP], mint(siblings=(0,), attempt=1, boundary=0), ContinuationInvalid, "continuation",
         "its last boundary -1"),
        (CHANGED, GIVEN_UP, IllegalTransition, "illegal_transition", "a waiting rollout with durable turns"),
        ([*STARTED, LOST], GIVEN_UP, IllegalTransition, "illegal_transition", "no turns"),
        ([*CHANGED, seal(siblings=(0,), rows=(1,))], GIVEN_UP, IllegalTransition, "illegal_transition", "is sealed"),
        ([*CHANGED, LOST, GIVEN_UP], GIVEN_UP, IllegalTransition, "illegal_transition", "no turns"),
        ([*CHANGED, LOST], of(GIVEN_UP, groups=(), siblings=()), IllegalTransition, "illegal_transition", "distinct"),
        ([*CHANGED, LOST], of(GIVEN_UP, groups=(0, 0), siblings=(0, 0)), IllegalTransition, "illegal_transition",
         "distinct"),
        ([*CHANGED, LOST], of(GIVEN_UP, groups=(0, 1)), IllegalTransition, "illegal_transition", "distinct"),
        ([*CHANGED, LOST], of(GIVEN_UP, siblings=(2,)), IllegalTransition, "illegal_transition", r"0\.\.1"),
        ([*CHANGED, LOST], of(GIVEN_UP, groups=(0, 9), siblings=(0, 0)), TwoOwners, "two_owners", "never reserved"),
        ([*CHANGED, LOST], of(GIVEN_UP, groups=(0, 1), siblings=(0, 0)), IllegalTransition, "illegal_transition",
         "no turns"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_refused_by_name_and_changes_nothing(
    before: list[Record], record: Record, kind: type[TidegateError], code: str, says: str
) -> None:
    ledger, untouched = fold(before), fold(before)
    with pytest.raises(TidegateError, match=says) as caught:
        apply(ledger, len(before), record)
    assert (type(caught.value), caught.value.code) == (kind, code)
    assert f"record {len(before)}" in str(caught.value)
    assert repr(ledger) == repr(untouched)  # by text: the NaN of an open reward is not equal to itself


# ---------------------------------------------------------------------- snapshots


@pytest.mark.parametrize(
    "records",
    [
        ANSWERED,
        INTENDED,
        CHANGED,
        TURNED,
        AGAIN,
        [*ANSWERED, of(TURN, revisions=None)],
        [*TURNED, of(ANSWER, boundary=2, turn=1, row=2, start=5), of(READ, boundary=2)],
        [*CHANGED, EXPORT, of(INTENT, cursor=1, resource="pen"), schema.RunClaimed(2, "o", "r")],
        [*AGAIN, of(LOST, attempt=1), GIVEN_UP],
        [*CHANGED, seal(siblings=(0,), rows=(1,))],
    ],
    ids=["answer", "open", "changed", "turn", "again", "unknown", "read", "export", "given_up", "sealed"],
)
def test_a_snapshot_of_a_rollout_in_the_middle_is_what_its_records_lead_to(records: list[Record]) -> None:
    folded = fold(records)
    back = rebuild(ledger_rows(folded))
    assert ledger_rows(back) == ledger_rows(folded)
    assert repr(back.groups) == repr(folded.groups)
    assert next_of(back) == next_of(folded)


def next_of(ledger: Ledger) -> list[str]:
    """What the ledger says to each record that may come next."""
    said: list[str] = []
    for record in (of(INTENT, cursor=1, revision=1), DONE, of(READ, cursor=1), EXPORT, TURN, GIVEN_UP):
        try:
            apply(rebuild(ledger_rows(ledger)), ledger.next_seq, record)
        except TidegateError as error:
            said.append(str(error))
        else:
            said.append("")
    return said

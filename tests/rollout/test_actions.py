"""Answers that attempts act on, across attempts and policy versions: what is durable of them stays what it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpu.rollout.messages import Accepted, Answered, Dispatch, Ended, Identity, Intent, Outcome, Progress, Report, Turn
from storage.payload import TurnRow, account_row, encode_block
from storage.verify import verify
from tests.rollout.building import RUN, Bench

ACTED = Identity(0, 0, 0, 1)
"""The attempt that answers, and whose successor ends the turn."""


def reported(
    bench: Bench, rows: Sequence[TurnRow], entries: Sequence[Progress], ended: Sequence[Ended] = ()
) -> Accepted:
    bench.blocks += 1
    block = encode_block(f"{bench.control.ledger.incarnation}-w-{bench.blocks}", rows)
    report = Report("w", block.name, block.digest, len(block.data), block.data, tuple(entries), tuple(ended))
    return bench.control.report(report)


def answered_two_versions_ago() -> tuple[Bench, Dispatch, TurnRow]:
    """An answer of version 0, and the attempt that goes on from it, dispatched at version 1."""
    bench = Bench(staleness=2)
    taken = bench.control.take("w", 1000)
    acted = next(dispatch for dispatch in taken if dispatch.identity == ACTED)
    call = bench.row(acted, 0, 0, 0.0, done=False)
    assert reported(bench, [call], [Answered(ACTED, 0, 0, 0, 0, 0, 2, 0)]).accepted == 1
    bench.seal([dispatch for dispatch in taken if dispatch is not acted and dispatch.identity.group])
    bench.train()
    bench.fail(acted, Outcome.WORKER_LOST)
    again = next(d for d in bench.control.take("w", 1000) if d.identity == Identity(0, 0, 1, 1))
    assert again.continuation is not None
    assert (again.continuation.at.pending, again.version, again.boundary) == (True, 1, 1)
    return bench, again, call


@pytest.mark.parametrize("told", [False, True])
def test_a_later_attempt_ends_the_turn_of_an_answer_that_older_weights_gave(told: bool) -> None:
    bench, again, call = answered_two_versions_ago()
    rows = [account_row(call, 1, done=False, reward=0.0, record="seen")] if told else []
    turn = Turn(again.identity, 1, 0, 0, 0 if told else -1, 2, 0, 0, b"state")
    assert reported(bench, rows, [turn]).accepted == 1
    assert bench.counts("abandoned_") == {"worker_lost": 1}
    assert bench.control.ledger.groups[0].rollouts[0].oldest == 0


def test_a_later_attempt_seals_an_answer_that_older_weights_gave_and_the_audit_understands_it() -> None:
    bench, again, call = answered_two_versions_ago()
    last = account_row(call, 1, done=True, reward=1.0, record="seen")
    assert reported(bench, [last], [], [Ended(again.identity, Outcome.SEALED, 0, 1, 0, 1.0)]).accepted == 1
    sibling = Dispatch(Identity(0, 1, 0, 1), 0, 0)
    bench.seal([sibling])
    while 0 not in bench.train():
        bench.seal(bench.control.take("w", 1000))
    bench.flush()
    assert verify(bench.store, RUN).problems == []


def test_tokens_that_are_older_than_any_of_the_rollout_are_refused_all_the_same() -> None:
    bench, again, _ = answered_two_versions_ago()
    turn = Turn(again.identity, 1, 0, 0, -1, 2, 0, -1, b"state")
    assert reported(bench, [], [turn]).accepted == 1
    assert bench.counts("abandoned_") == {"worker_lost": 1, "malformed": 1}


def test_an_intent_that_is_said_again_changes_nothing_and_says_what_to_wait_for() -> None:
    """An attempt that finds an open request may have taken over from one that died before its intent was durable."""
    bench, again, _ = answered_two_versions_ago()
    intent = Intent(again.identity, 0, 0, "box", 0, "input")
    first = reported(bench, [], [intent])
    bench.fail(again, Outcome.WORKER_LOST)
    third = next(d for d in bench.control.take("w", 1000) if d.identity == Identity(0, 0, 2, 1))
    before = bench.writer.last_seq
    said = reported(bench, [], [Intent(third.identity, 0, 0, "box", 0, "input")])
    assert (said.accepted, said.over) == (0, ())
    assert first.seq < before == said.seq == bench.writer.last_seq


def test_an_attempt_whose_answer_is_refused_hears_that_it_is_over_and_does_not_act() -> None:
    """Its intent is none: waiting for the record that its report led to would be waiting for somebody else's."""
    bench = Bench()
    taken = bench.control.take("w", 1000)
    acted = next(dispatch for dispatch in taken if dispatch.identity == ACTED)
    call = bench.row(acted, 0, 0, 0.0, done=False)
    too_old = Answered(ACTED, 0, 0, 0, 0, 0, 2, -1)
    said = reported(bench, [call], [too_old, Intent(ACTED, 0, 0, "box", 0, "input")])
    assert said.over == (ACTED,)
    assert bench.counts("abandoned_") == {"malformed": 1}

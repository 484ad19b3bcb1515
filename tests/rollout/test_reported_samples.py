"""What a report says about turns and output samples: what does not follow is malformed, and harms nobody else."""

from __future__ import annotations

import msgspec
import pytest

from gpu.rollout.messages import Dispatch, Identity, Report, Turn
from tests.rollout.building import Bench


def started() -> tuple[Bench, list[Dispatch]]:
    bench = Bench()
    return bench, bench.control.take("w", 2)


def turn_report(bench: Bench, dispatch: Dispatch, *turns: tuple[int, int]) -> Report:
    """One report of turns (turn, sample), with ascending boundaries and rows."""
    report = bench.turn_of(dispatch, 0, 0)
    samples = [sample for _, sample in turns]
    made = [
        Turn(dispatch.identity, at, turn, sample, at, 2 * samples[:at].count(sample), 2, 0, b"")
        for at, (turn, sample) in enumerate(turns)
    ]
    return msgspec.structs.replace(report, turns=tuple(made))


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([(0, 1)], "sample 1 after sample -1"),
        ([(1, 0)], "turn 1 in row 0 after turn -1"),
        ([(0, 0), (1, 2)], "sample 2 after sample 0"),
        ([(0, 0), (1, 1), (2, 0)], "sample 0 after sample 1"),
        ([(0, 0), (0, 0)], "turn 0 in row 1 after turn 0"),
        ([(0, 0), (2, 0)], "turn 2 in row 1 after turn 0"),
    ],
)
@pytest.mark.parametrize("together", [True, False], ids=["one report", "report by report"])
def test_turns_that_do_not_follow_are_malformed(turns: list[tuple[int, int]], says: str, together: bool) -> None:
    bench, (bad, good) = started()
    report = turn_report(bench, bad, *turns)
    if together:
        bench.control.report(report)
    else:
        for turn in report.turns:
            one = bench.turn_of(bad, 0, 0)
            bench.control.report(msgspec.structs.replace(one, turns=(turn,)))
    bench.seal([good])
    rollouts = bench.control.ledger.groups[0].rollouts
    assert [rollout.state.value for rollout in rollouts] == ["waiting", "sealed"]
    assert (rollouts[0].failures, rollouts[0].losses) == (1, 0)
    assert bench.control.ledger.counts["abandoned_malformed"] == 1
    assert says in repr(bench.abandoned()[0].detail)


@pytest.mark.parametrize(
    ("turns", "samples", "sealed"),
    [
        ([], 1, True),
        ([], 0, False),
        ([], 2, False),
        ([(0, 0)], 1, True),
        ([(0, 0)], 2, True),
        ([(0, 0)], 3, False),
        ([(0, 0), (1, 1)], 1, False),
        ([(0, 0), (1, 1)], 2, True),
        ([(0, 0), (1, 1)], 3, True),
        ([(0, 0), (1, 1)], 4, False),
    ],
)
@pytest.mark.parametrize("together", [True, False], ids=["one report", "two reports"])
def test_a_seal_ends_the_open_sample_or_one_more(
    turns: list[tuple[int, int]], samples: int, sealed: bool, together: bool
) -> None:
    bench, (one, _) = started()
    report = turn_report(bench, one, *turns)
    end = bench.report_of([one])
    row = len(turns) if together else 0
    ended = tuple(msgspec.structs.replace(entry, samples=samples, row=row) for entry in end.ended)
    if together:
        bench.control.report(msgspec.structs.replace(report, ended=ended))
    else:
        bench.control.report(report)
        bench.control.report(msgspec.structs.replace(end, ended=ended))
    rollout = bench.control.ledger.groups[0].rollouts[0]
    if sealed:
        assert (rollout.state.value, rollout.samples) == ("sealed", samples)
    else:
        assert bench.control.ledger.counts["abandoned_malformed"] == 1
        assert f"{samples} samples" in bench.abandoned()[0].detail


def test_a_malformed_turn_keeps_the_turns_before_it_for_the_next_attempt() -> None:
    bench, (one, _) = started()
    bench.control.report(turn_report(bench, one, (0, 0), (1, 1), (2, 5)))
    bench.flush()
    bench.clock.advance(100.0)
    again = next(d for d in bench.control.take("w", 100) if d.identity == Identity(0, 0, 1, 1))
    assert again.continuation is not None
    assert (again.boundary, again.continuation.at.turn) == (2, 1)
    last = Turn(again.identity, 2, 2, 1, 0, 2, 2, 0, b"")
    assert bench.control.report(msgspec.structs.replace(bench.turn_of(again, 2, 2), turns=(last,))).accepted == 1


def test_a_fresh_group_is_dispatched_as_exactly_its_sibling_slots() -> None:
    bench = Bench(num_siblings=4, max_executing=16)
    taken = [dispatch.identity for dispatch in bench.control.take("w", 100)]
    assert len(set(taken)) == len(taken) == 16
    for ordinal in range(4):
        assert [one.sibling for one in taken if one.group == ordinal] == [0, 1, 2, 3]
        assert len(bench.control.ledger.groups[ordinal].rollouts) == 4

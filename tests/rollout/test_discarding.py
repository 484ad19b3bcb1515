"""A person gives up the turns of unfinished rollouts: they start over, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli import main
from gpu.rollout.messages import Outcome
from storage.errors import ContinuationInvalid
from storage.local import LocalStore
from tests.rollout.building import RUN, Bench


def test_live_and_waiting_rollouts_start_over_and_those_without_turns_are_left_alone() -> None:
    bench = Bench()
    first, second, third = bench.control.take("w", 3)
    for dispatch in (first, second):
        bench.control.report(bench.turn_of(dispatch, 0, 0))
    bench.fail(second, Outcome.WORKER_LOST)
    wanted = [(d.identity.group, d.identity.sibling) for d in (first, second, third)]
    assert bench.control.results.discard_continuations(wanted, "broken tool") == 2
    rollouts = [bench.control.ledger.groups[group].rollouts[sibling] for group, sibling in wanted]
    assert [one.boundary for one in rollouts] == [None, None, None]
    assert [one.state.value for one in rollouts] == ["waiting", "waiting", "live"]
    assert [one.boundaries for one in rollouts] == [1, 1, 0], "their numbers are not used again"
    bench.flush()
    before = bench.writer.last_seq
    assert bench.control.results.discard_continuations(wanted, "again") == 0
    assert bench.writer.last_seq == before, "it may be repeated"
    again = {d.identity: d for d in bench.control.take("w", 100)}
    for dispatch in (first, second):
        one = dispatch.identity
        (found,) = [d for i, d in again.items() if (i.group, i.sibling) == (one.group, one.sibling)]
        assert (found.identity.attempt, found.continuation, found.boundary) == (1, None, 1)


def test_of_rollouts_one_of_which_is_finished_none_is_discarded() -> None:
    bench = Bench()
    first, second = bench.control.take("w", 2)
    bench.control.report(bench.turn_of(first, 0, 0))
    bench.seal([second])
    for wanted in ([(0, 0), (0, 1)], [(0, 0), (99, 0)], [(0, 7)], []):
        with pytest.raises(ContinuationInvalid, match="unfinished"):
            bench.control.results.discard_continuations(wanted, "no")
    assert bench.control.ledger.groups[0].rollouts[0].boundary is not None


def test_a_group_whose_budget_is_spent_on_the_way_is_set_aside_and_the_call_goes_on() -> None:
    bench = Bench(max_losses=1)
    taken = bench.control.take("w", 4)
    for dispatch in taken:
        bench.control.report(bench.turn_of(dispatch, 0, 0))
    bench.fail(taken[1])
    wanted = [(dispatch.identity.group, dispatch.identity.sibling) for dispatch in taken]
    assert bench.control.results.discard_continuations(wanted, "broken tool") == len(wanted)
    assert bench.control.ledger.quarantined
    bench.control.check_conservation()
    assert not any(one.boundary for group in bench.control.ledger.groups.values() for one in group.rollouts)


def test_a_run_that_nobody_drives_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Bench(store=LocalStore(tmp_path)).flush()
    assert main(["discard", RUN, "0/0", "--reason", "x", "--storage", str(tmp_path)]) == 2
    assert "no living manager" in capsys.readouterr().err

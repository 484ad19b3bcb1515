"""Adversarial scenarios of execution: results that must not count, and capacities.

Numbers ("22.") are those of the project's list of scenarios; see `test_scenarios_of_batches` and
`test_scenarios_of_holds`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gpu.environments.registry import make_environment
from gpu.rollout.messages import Accepted, Dispatch, Ended, Identity, Outcome, Report, Turn
from storage.errors import TidegateError
from tests.rollout.building import Bench, limits


def counted(answer: Accepted) -> tuple[int, int]:
    return answer.accepted, answer.ignored


def everything(bench: Bench) -> list[Dispatch]:
    return bench.control.take("w", 1000)


def one(identity: Identity, outcome: Outcome = Outcome.SEALED) -> Report:
    return Report("w", "x", "", 0, None, (), (Ended(identity, outcome, 0, 1, 0, 1.0),))


# ---------------------------------------------------------------------- results


def test_of_ten_results_the_one_that_does_not_count_takes_nothing_from_the_others() -> None:
    """4. One of a batch of ten is of an older attempt."""
    bench = Bench(max_executing=10, staleness=None)
    taken = everything(bench)
    report = bench.report_of(taken)
    bench.fail(taken[3], Outcome.ENGINE_LOST)
    assert counted(bench.control.report(report)) == (9, 1)
    assert [bench.place(ordinal) for ordinal in range(5)] == ["completed", "reserved", *["completed"] * 3]


def test_a_turn_out_of_order_is_a_malformed_result_and_no_crash_of_the_worker() -> None:
    """4. A report is judged as a whole before anything of it is written."""
    bench = Bench()
    dispatch = everything(bench)[0]
    assert bench.control.report(bench.turn_of(dispatch, turn=3, boundary=0)).accepted == 1
    assert bench.counts("abandoned_") == {"malformed": 1}
    assert bench.counts("payload_stored") == {}


@pytest.mark.parametrize("first", ["turn", "seal"])
@pytest.mark.parametrize("second", ["turn", "seal"])
def test_two_rollouts_that_claim_one_row_of_tokens_are_one_result_and_one_malformed(first: str, second: str) -> None:
    """4. The same tokens would be trained for two slots."""
    bench = Bench()
    one, other = everything(bench)[:2]
    block = bench.report_of([one])
    entries: dict[str, list[Any]] = {"turn": [], "seal": []}
    for kind, dispatch in ((first, one), (second, other)):
        made = bench.turn_of(dispatch, 0, 0).turns if kind == "turn" else bench.report_of([dispatch]).ended
        entries[kind].append(made[0])
    report = msgspec.structs.replace(block, turns=tuple(entries["turn"]), ended=tuple(entries["seal"]))
    assert {entry.row for entry in (*report.turns, *report.ended)} == {0}
    bench.control.report(report)
    assert bench.counts("abandoned_") == {"malformed": 1}
    assert bench.control.ledger.counts["turn_committed"] + bench.control.ledger.counts["rollouts_sealed"] == 1


def test_a_report_that_gives_a_stored_block_another_content_settles_nothing() -> None:
    """4. A second settlement with other content."""
    bench = Bench()
    first, second = everything(bench)[:2]
    stored = bench.report_of([first])
    bench.control.report(stored)
    other = msgspec.structs.replace(bench.report_of([second], reward=0.5), block=stored.block)
    with contextlib.suppress(TidegateError):
        bench.control.report(other)
    assert bench.counts("rollouts_sealed") == {"": 1}


@pytest.mark.parametrize(
    "identity",
    [
        Identity(0, 2, 0, 1), Identity(0, -1, 0, 1), Identity(99, 0, 0, 1), Identity(-1, 0, 0, 1), Identity(0, 0, 1, 1),
        Identity(0, 0, -1, 1), Identity(0, 0, 0, 0), Identity(0, 0, 0, 2),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("outcome", [Outcome.SEALED, Outcome.FAILED])
def test_a_result_of_nobody_changes_nothing(identity: Identity, outcome: Outcome) -> None:
    """18. Too many slots, identities of another slot, group, attempt or incarnation."""
    bench = Bench()
    everything(bench)
    before = bench.writer.last_seq
    assert counted(bench.control.report(one(identity, outcome))) == (0, 1)
    turn = Turn(identity, 0, 0, 0, 0, 0, 1, 0, b"")
    assert counted(bench.control.report(Report("w", "x", "", 0, None, (turn,), ()))) == (0, 1)
    assert bench.writer.last_seq == before


def test_two_ends_of_one_attempt_in_one_report_count_once() -> None:
    """18, 22. The first one counts."""
    bench = Bench()
    taken = everything(bench)
    report = bench.report_of(taken[:1])
    twice = (*report.ended, msgspec.structs.replace(report.ended[0], outcome=Outcome.FAILED))
    assert counted(bench.control.report(msgspec.structs.replace(report, ended=twice))) == (1, 1)
    assert bench.counts("abandoned_") == {}


def test_a_group_with_a_live_sibling_is_not_settled_however_its_others_failed() -> None:
    """19. A sibling that does not notice keeps the group and its place."""
    bench = Bench(max_attempts=1, max_executing=4)
    failing, slow = everything(bench)[:2]
    bench.fail(failing)
    assert bench.place(0) == "generating"
    assert bench.control.ledger.dispatched == 2
    bench.seal([slow])
    assert bench.place(0) == "quarantined"
    assert bench.control.ledger.dispatched == 1


def test_an_attempt_can_change_nothing_of_what_the_next_one_gets() -> None:
    """20. Code that mutates its input."""
    bench = Bench(max_executing=2)
    first, _ = everything(bench)
    with pytest.raises(AttributeError):
        first.version = 7  # type: ignore[misc]
    bench.control.lose_worker("w")
    again, _ = everything(bench)
    expected = msgspec.structs.replace(first.identity, attempt=1)
    assert again == msgspec.structs.replace(first, identity=expected)
    for name in ("reverse", "addition", "guess"):
        task = make_environment(name, {}).task(0)
        assert isinstance(task, bytes)


def test_a_verdict_of_nobody_leaves_a_group_whose_work_is_tried_again_as_it_is() -> None:
    """31. Work that raised has one owner of its retry; a late verdict must not take it away."""
    bench = Bench(batch=1)
    bench.judge_outside()
    bench.seal(everything(bench)[:2])
    results = bench.control.results
    assert list(dict(results.begin_judging())) == [0]
    results.judging_failed(0, ValueError("boom"))
    results.judge(0, "late")
    assert bench.place(0) == "generating"
    bench.clock.advance(1.0)
    assert list(dict(results.begin_judging())) == [0]
    results.judge(0, "")
    bench.flush()
    assert bench.train() == (0,)


# ---------------------------------------------------------------------- capacities

ENDS: dict[str, Callable[[Bench, Dispatch], Report]] = {
    "success": lambda bench, dispatch: bench.report_of([dispatch]),
    **{
        outcome.value: lambda bench, dispatch, outcome=outcome: one(dispatch.identity, outcome)
        for outcome in Outcome
        if outcome is not Outcome.SEALED
    },
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_rollout_gives_back_its_credit_exactly_once(end: str) -> None:
    """22. Success, error, cancellation, loss, early return, and the same end twice."""
    bench = Bench(max_executing=4, staleness=None, max_losses=1, max_attempts=1)
    taken = everything(bench)
    assert len(taken) == bench.control.ledger.live == 4
    for left, dispatch in enumerate(taken[:2], 1):
        report = ENDS[end](bench, dispatch)
        for _ in range(3):
            bench.control.report(report)
            assert bench.control.ledger.live == 4 - left
    fresh = everything(bench)
    assert {dispatch.identity.group for dispatch in fresh} == {2}, "two credits make one whole group"
    assert bench.control.ledger.live == 4
    bench.control.lose_worker("w")
    assert bench.control.ledger.live == 0


def test_one_straggler_in_every_group_bounds_the_open_groups_and_stops_nothing() -> None:
    """25. Credits come back one by one, so open groups would grow without the places."""
    bench = Bench(num_siblings=4, batch=2, staleness=None, max_executing=16, max_completed=6, max_retained=6)
    stragglers: list[Dispatch] = []
    while bench.control.ledger.step < 20:
        while fresh := everything(bench):
            stragglers += [dispatch for dispatch in fresh if dispatch.identity.sibling == 3]
            bench.seal([dispatch for dispatch in fresh if dispatch.identity.sibling < 3])
        assert bench.control.ledger.state_counts()["generating"] <= 6
        assert "completed (P): 6 of 6" in str(bench.control.status()["submission_waits_for"])
        bench.seal([stragglers.pop(0), stragglers.pop(0)])
        bench.train()
    assert bench.counts("requeued_") == {}


@pytest.mark.parametrize("n", [1, 2])
def test_capacities_can_be_lowered_and_raised_between_incarnations(n: int) -> None:
    """26. More than P unsettled is legal after a restore: nothing new starts until there is room, nothing is lost."""
    wide = {"num_siblings": n, "batch": 1, "staleness": None, "max_backoff": 0, "max_executing": 6 * n}
    bench = Bench(**wide, max_completed=6, max_retained=6)
    assert len(everything(bench)) == 6 * n
    bench.flush()
    bench.limits = limits(**wide, max_completed=2, max_retained=2)
    for left in (6, 5, 4, 3, 2):
        bench.restart()
        bench.activate()
        taken = everything(bench)
        assert len({dispatch.identity.group for dispatch in taken}) == left
        bench.seal([dispatch for dispatch in taken if dispatch.identity.group == 6 - left])
        bench.train()
    assert bench.control.ledger.frontier == 6
    fresh = everything(bench)
    assert {dispatch.identity.group for dispatch in fresh} == {6}
    bench.limits = limits(**wide, max_completed=6, max_retained=6)
    bench.flush()
    bench.restart()
    bench.activate()
    assert {dispatch.identity.group for dispatch in everything(bench)} == {5, 6, 7, 8, 9, 10}


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_capacities_of_one_are_enough(staleness: int | None) -> None:
    """29. Everything at its least."""
    bench = Bench(num_siblings=1, batch=1, staleness=staleness, max_executing=1, max_completed=1, max_retained=1,
                  max_backoff=0, eviction_cap=1)  # fmt: skip
    trained: list[int] = []
    for _ in range(10):
        bench.seal(everything(bench))
        trained += bench.train()
    assert trained == list(range(10))


@pytest.mark.parametrize(("staleness", "unsettled"), [(0, 2), (1, 4), (2, 6), (None, 12)])
def test_as_many_groups_start_as_the_bound_can_train_in_time_and_not_one_fewer(
    staleness: int | None, unsettled: int
) -> None:
    """51. Exact counts for no bound and for each bound, at the moment of training."""
    bench = Bench(batch=2, staleness=staleness, max_executing=100, max_completed=12, max_retained=12)
    taken = everything(bench)
    assert len({dispatch.identity.group for dispatch in taken}) == unsettled
    bench.seal(taken)
    ages: list[int] = []
    for _ in range(unsettled // 2):
        grant = bench.grant()
        ages += [grant.lease.version - group.oldest for group in grant.lease.groups]
        bench.commit(grant)
    assert ages == [age for age in range(unsettled // 2) for _ in range(2)]


def test_a_version_may_jump_ahead_and_go_back_and_each_group_keeps_its_own() -> None:
    """33. Engines that are behind, far ahead, behind again, and a group with tokens of two versions."""
    bench = Bench(num_siblings=1, batch=1, staleness=None, max_executing=1)

    def step() -> tuple[int, int]:
        bench.seal(everything(bench))
        grant = bench.grant()
        bench.control.leasing.commit(grant.lease.lease, grant.lease.step, "s", f"weights-{grant.lease.step}", {})
        bench.control.publish_policy(f"weights-{grant.lease.step}")
        bench.flush()
        return grant.lease.version, grant.lease.groups[0].oldest

    assert [step() for _ in range(10)] == [(version, 0) for version in range(10)]
    bench.control.serve(10)
    assert step() == (10, 10)
    bench.control.serve(5)
    (behind,) = everything(bench)
    assert behind.version == 5
    bench.control.report(bench.turn_of(behind, 0, 0))
    bench.control.serve(11)
    bench.control.lose_worker("w")
    again = everything(bench)
    assert (again[0].version, again[0].continuation is not None) == (11, True)
    bench.seal(again)
    assert bench.grant().lease.groups[0].oldest == 5

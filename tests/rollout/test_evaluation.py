"""An evaluation that is due has one result, whatever happens to it, and knows nothing of the others."""

from __future__ import annotations

import pytest

from gpu.rollout.evaluation import Suite
from gpu.rollout.messages import Dispatch, Outcome
from storage.errors import IllegalTransition
from storage.schema import EvaluationDone
from tests.rollout.building import Bench

ONE = Suite("one", tasks=2, samples=2, threshold=0.0)
TWO = Suite("two", tasks=1, samples=1, threshold=0.0)


def bench_of(*suites: Suite) -> Bench:
    """One committed step, served, and room for everything."""
    bench = Bench(suites=suites, staleness=None, max_executing=32, max_completed=8, max_retained=8)
    train(bench)
    return bench


def train(bench: Bench) -> None:
    owned, _ = take(bench)
    bench.seal(owned)
    bench.train()


def take(bench: Bench) -> tuple[list[Dispatch], list[Dispatch]]:
    taken = bench.control.take("w", 1000)
    return [d for d in taken if d.plain is None], [d for d in taken if d.plain is not None]


def of(plain: list[Dispatch], suite: Suite) -> list[Dispatch]:
    return [d for d in plain if d.plain and d.plain.suite == suite.name]


def newest(bench: Bench, suite: Suite = ONE) -> EvaluationDone:
    return bench.control.evaluations.newest[suite.name]


def test_what_is_due_runs_every_sample_of_every_task_once_and_is_recorded() -> None:
    bench = bench_of(ONE)
    assert bench.control.evaluations.due(1) == 1
    _, plain = take(bench)
    assert sorted((d.plain.index, d.identity.sibling) for d in plain if d.plain) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    bench.end_plain(plain[:3])
    assert list(bench.control.ledger.due) == [("one", 1)]
    bench.end_plain(plain[3:], reward=0.0)
    expected = {"reward_mean": 0.75, "pass@1": 0.75, "pass@2": 1.0, "tokens_mean": 2.0}
    assert newest(bench) == EvaluationDone("one", 1, "weights-1", False, 1, 1, 2, 4, 0, expected)
    assert bench.control.ledger.evaluated == {("one", 1)}


def test_being_due_may_be_repeated_and_starts_nothing_twice() -> None:
    bench = bench_of(ONE)
    evaluations = bench.control.evaluations
    assert [evaluations.due(1), evaluations.due(1)] == [1, 0]
    _, plain = take(bench)
    assert len(plain) == 4
    bench.end_plain(plain)
    assert evaluations.due(1) == 0
    assert take(bench)[1] == []
    with pytest.raises(IllegalTransition, match="step 1, committed last"):
        evaluations.due(2)


def test_a_version_that_moved_makes_the_result_mixed_with_the_versions_seen() -> None:
    bench = bench_of(ONE)
    bench.control.evaluations.due(1)
    owned, plain = take(bench)
    bench.end_plain(plain[:3])
    bench.seal(owned)
    bench.train()
    late = [Dispatch(plain[3].identity, 2, 0, None, plain[3].plain)]
    bench.end_plain(late)
    done = newest(bench)
    assert (done.step, done.digest, done.mixed, done.oldest, done.newest) == (1, "weights-1", True, 1, 2)


def test_only_an_evaluation_that_an_activation_would_mix_delays_it() -> None:
    bench = bench_of(ONE)
    evaluations = bench.control.evaluations
    assert evaluations.delaying(2) == []
    evaluations.due(1)
    assert evaluations.delaying(2) == ["one at step 1"]
    assert evaluations.delaying(1) == [], "the same version again moves nothing"
    train(bench)
    assert evaluations.delaying(3) == [], "its version is gone already"
    assert evaluations.delaying(None) == ["one at step 1"]


def test_a_failed_sample_is_counted_and_is_no_reward_of_zero() -> None:
    bench = bench_of(ONE)
    bench.control.evaluations.due(1)
    for _ in range(bench.limits.max_attempts):
        _, plain = take(bench)
        bad = [d for d in plain if d.plain and (d.plain.index, d.identity.sibling) == (1, 0)]
        bench.end_plain([d for d in plain if d not in bad])
        bench.end_plain(bad, Outcome.FAILED)
    done = newest(bench)
    assert (done.samples, done.failed, done.metrics["reward_mean"], done.metrics["pass@1"]) == (4, 1, 1.0, 1.0)


def test_an_evaluation_of_which_nothing_finished_has_no_metrics_and_is_recorded() -> None:
    bench = bench_of(TWO)
    bench.control.evaluations.due(1)
    for _ in range(bench.limits.max_attempts):
        bench.end_plain(take(bench)[1], Outcome.FAILED)
    done = newest(bench, TWO)
    assert (done.samples, done.failed, done.metrics, done.mixed, done.oldest) == (1, 1, {}, False, -1)


def test_overlapping_evaluations_end_by_themselves() -> None:
    bench = bench_of(ONE, TWO)
    evaluations = bench.control.evaluations
    evaluations.due(1)
    owned, first = take(bench)
    hold = bench.control.acquire("driver", "update", 1, 60.0)
    bench.end_plain(of(first, TWO))
    assert evaluations.delaying(None) == ["one at step 1"]
    assert not bench.control.admission.is_open, "the end of one reopens nothing"
    bench.control.admission.release(hold.hold)
    bench.seal(owned)
    bench.train()
    evaluations.due(2)
    assert evaluations.delaying(None) == ["one at step 1", "one at step 2", "two at step 2"]
    _, second = take(bench)
    bench.end_plain(second)
    assert bench.control.ledger.evaluated == {("two", 1), ("one", 2), ("two", 2)}
    bench.end_plain(of(first, ONE))
    assert not bench.control.ledger.due
    assert not newest(bench).mixed


def test_training_groups_are_leased_while_an_evaluation_runs() -> None:
    bench = bench_of(ONE)
    bench.control.evaluations.due(1)
    for _ in range(3):
        train(bench)
    assert bench.control.ledger.step == 4
    assert bench.control.plain.live == 4


def test_the_next_incarnation_runs_again_what_is_due_and_only_that() -> None:
    bench = bench_of(ONE, TWO)
    bench.control.evaluations.due(1)
    _, before = take(bench)
    bench.end_plain(of(before, TWO))
    bench.flush()
    bench.restart()
    assert bench.control.evaluations.delaying(None) == ["one at step 1"]
    assert take(bench) == ([], []), "nothing serves yet"
    bench.activate()
    assert bench.control.evaluations.due(1) == 0
    _, again = take(bench)
    assert len(again) == 4
    assert bench.end_plain(of(before, ONE)) == 0, "late results of the older incarnation"
    bench.end_plain(again)
    assert (newest(bench).digest, newest(bench).mixed) == ("weights-1", False)
    assert not bench.control.ledger.due


def test_a_suite_that_is_no_longer_configured_is_settled_without_a_measurement() -> None:
    bench = bench_of(ONE, TWO)
    bench.control.evaluations.due(1)
    bench.flush()
    bench.suites = (TWO,)
    bench.restart()
    assert (newest(bench).tasks, newest(bench).samples, newest(bench).metrics) == (0, 0, {})
    assert list(bench.control.ledger.due) == [("two", 1)]


def test_the_end_of_the_run_records_what_there_is() -> None:
    bench = bench_of(ONE, TWO)
    bench.control.evaluations.due(1)
    _, plain = take(bench)
    bench.end_plain(of(plain, ONE)[:3])
    bench.control.finish("end")
    assert (newest(bench).failed, newest(bench).metrics["pass@1"]) == (1, 1.0)
    assert (newest(bench, TWO).failed, newest(bench, TWO).metrics) == (1, {})
    assert bench.control.ledger.finished == "end"
    assert bench.control.plain.used == bench.control.plain.live == 0
    assert bench.end_plain(plain) == 0

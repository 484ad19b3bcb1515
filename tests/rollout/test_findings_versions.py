"""What others were found to get wrong about versions and identities, and what we do instead. Each test names the
finding ("A21") it answers; it would fail on the behaviour that was found."""

from __future__ import annotations

import random

import msgspec
import pytest

from gpu.rollout.evaluation import Suite
from gpu.rollout.limits import Order
from gpu.rollout.messages import Dispatch, Ended, Identity, Outcome, PlainEnded, Report
from tests.rollout.building import Bench


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_bound_holds_at_the_version_that_trains_and_not_only_when_the_batch_was_drawn(
    staleness: int, order: Order
) -> None:
    """A21: a batch was judged when it was drained; then it waited for training and for a push, so that limit 0 still
    trained at +1."""
    rng = random.Random(staleness)
    bench = Bench(batch=2, staleness=staleness, order=order, max_executing=12, max_completed=8, max_retained=8)
    versions: dict[int, int] = {}
    running: list[Dispatch] = []
    ages: list[int] = []
    while bench.control.ledger.step < 15:
        running += bench.control.take("w", 100)
        for dispatch in running:
            versions[dispatch.identity.group] = min(dispatch.version, versions.get(dispatch.identity.group, 99))
        done = rng.sample(running, rng.randint(1, len(running))) if running else []
        running = [dispatch for dispatch in running if dispatch not in done]
        if done:
            bench.seal(done)
        bench.control.try_lease()
        if (lease := bench.control.ledger.lease) is None:
            continue
        bench.activate()  # whatever others publish while the trainer waits does not move the version under a lease
        assert bench.control.ledger.step == lease.version
        ages += [lease.version - versions[group.ordinal] for group in lease.groups]
        bench.train()
    assert min(ages) >= 0
    assert max(ages) == staleness
    assert bench.counts("requeued_") == {}


@pytest.mark.parametrize("version", [-1, 2, 4], ids=["unknown", "older than the dispatch", "never published"])
@pytest.mark.parametrize("what", ["turn", "seal"])
def test_tokens_of_a_version_that_cannot_have_made_them_are_no_result_and_are_counted(version: int, what: str) -> None:
    """A22: groups with unknown versions always passed and were not counted."""
    bench = Bench(batch=1, staleness=None, max_executing=2)
    for _ in range(3):
        bench.seal(bench.control.take("w", 2))
        bench.train()
    dispatch = bench.control.take("w", 1)[0]
    assert dispatch.version == 3
    whole = bench.report_of([dispatch]) if what == "seal" else bench.turn_of(dispatch, 0, 0)
    ended = tuple(msgspec.structs.replace(one, oldest=version) for one in whole.ended)
    turns = tuple(msgspec.structs.replace(one, oldest=version) for one in whole.turns)
    bench.control.report(msgspec.structs.replace(whole, ended=ended, turns=turns))
    assert bench.counts("abandoned_malformed") == {"": 1}
    assert bench.counts("turn_committed") == {}


def test_an_evaluation_survives_a_result_of_a_version_that_was_never_published() -> None:
    """A22 for plain executions: the report raises, and the evaluation stays due for ever."""
    bench = Bench(suites=[Suite("one", 1, 1, 0.0)], staleness=None, max_executing=32, max_completed=8, max_retained=8)
    bench.seal(bench.control.take("w", 100))
    bench.train()
    bench.control.evaluations.due(1)
    (plain,) = [dispatch for dispatch in bench.control.take("w", 100) if dispatch.plain]
    ended = PlainEnded(plain.identity, Outcome.SEALED, 1, 1, 9, 1.0)
    assert bench.control.report(Report("w", "", "", 0, None, (), (), (ended,))).accepted == 1
    bench.control.finish("enough")
    assert bench.control.ledger.evaluated == {("one", 1)}


@pytest.mark.parametrize("order", Order)
def test_no_bound_means_that_no_group_is_ever_too_old(order: Order) -> None:
    """A23: "no limit" rejected whatever was older than the last update in one mode, and nothing in the other."""
    bench = Bench(batch=1, staleness=None, order=order, length=6)
    old = bench.control.take("w", 2)
    for _ in range(5):
        bench.seal(bench.control.take("w", 2))
        bench.train()
    bench.seal(old)
    assert bench.train() == (0,)
    assert bench.counts("requeued_") == bench.counts("discarded_") == {}


def test_a_receipt_is_a_value_that_crosses_processes_and_is_known_again_after_a_restart() -> None:
    """A28: a receipt was an object: it could neither cross a process nor survive a restart."""
    bench = Bench()
    taken = bench.control.take("w", 3)
    here = bench.report_of(taken[:2])
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=Report)
    assert there is not here
    assert bench.control.report(there).accepted == 2
    assert bench.control.report(here).ignored == 2
    late = bench.report_of(taken[2:])
    bench.flush()
    bench.restart()
    bench.activate()
    again = bench.control.take("w", 1)[0]
    assert again.identity == Identity(1, 0, 1, 2), "the next attempt of the next incarnation"
    assert (bench.control.report(late).accepted, bench.control.report(here).accepted) == (0, 0)
    forged = Ended(Identity(1, 0, 1, 1), Outcome.SEALED, 0, 1, 0, 1.0)
    assert bench.control.report(Report("w", "x", "", 0, None, (), (forged,))).accepted == 0

"""Plain executions share E with owned ones, under both policies, and give it back exactly once however they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.rollout.limits import Submission
from gpu.rollout.messages import Dispatch, Identity, Outcome, PlainEnded, PlainTask, Report
from gpu.rollout.plain import PlainGroup, PlainSource, plain_share
from tests.rollout.building import Bench, limits

ENDS = [Outcome.FAILED, Outcome.MALFORMED, Outcome.ABORTED, Outcome.ENGINE_LOST, Outcome.WORKER_LOST]


def tasks(name: str = "s", count: int = 100) -> Iterator[PlainTask]:
    return (PlainTask(name, index) for index in range(count))


def opened(bench: Bench, samples: int = 2, count: int = 100, capacity: int = 100, name: str = "s") -> PlainSource:
    source = PlainSource(tasks(name, count), samples, capacity, finite=True)
    bench.control.plain.open(source)
    return source


def take(bench: Bench, worker: str = "w", limit: int = 1000) -> tuple[list[Dispatch], list[Dispatch]]:
    """Owned and plain dispatches for a worker."""
    taken = bench.control.take(worker, limit)
    return [d for d in taken if d.plain is None], [d for d in taken if d.plain is not None]


def groups(source: PlainSource) -> list[PlainGroup]:
    return list(iter(source.pop, None))


def at_rest(bench: Bench) -> None:
    plain = bench.control.plain
    assert (plain.used, plain.live) == (0, 0)
    assert not [identity for identity in bench.control.scheduler.active if identity.group < 0]


class TestCapacity:
    def test_owned_and_plain_rollouts_are_live_within_one_e(self) -> None:
        bench = Bench(max_executing=8)
        opened(bench)
        owned, plain = take(bench)
        assert (len(owned), len(plain)) == (4, 4)
        assert take(bench) == ([], [])
        bench.seal(owned[:1])
        assert take(bench) == ([], []), "one credit is no group of two"
        bench.seal(owned[1:2])
        assert [len(part) for part in take(bench)] == [2, 0]
        bench.end_plain(plain[:1])
        assert take(bench) == ([], [])
        bench.end_plain(plain[1:2])
        assert [len(part) for part in take(bench)] == [0, 2]

    def test_under_the_group_policy_a_group_counts_until_its_last_rollout(self) -> None:
        bench = Bench(submission=Submission.GROUP, max_executing=4)
        opened(bench, samples=3)
        owned, plain = take(bench)
        assert (len(owned), len(plain)) == (2 * 2, 2 * 3)
        bench.end_plain(plain[:2])
        assert take(bench) == ([], [])
        bench.end_plain(plain[2:3])
        assert [len(part) for part in take(bench)] == [0, 3]
        bench.seal(owned[:2])
        assert [len(part) for part in take(bench)] == [2, 0]

    def test_plain_executions_leave_half_of_e_to_training_also_when_it_is_idle(self) -> None:
        bench = Bench(max_executing=8, length=0)
        opened(bench)
        owned, plain = take(bench)
        assert (len(owned), len(plain)) == (0, 4)

    def test_the_share_never_keeps_a_whole_owned_group_out(self) -> None:
        assert plain_share(limits(max_executing=8, num_siblings=2)) == 4
        assert plain_share(limits(max_executing=8, num_siblings=7)) == 1
        assert plain_share(limits(max_executing=8, num_siblings=8)) == 0
        assert plain_share(limits(max_executing=8, num_siblings=8, submission=Submission.GROUP)) == 4
        assert plain_share(limits(max_executing=1, submission=Submission.GROUP)) == 0

    def test_fresh_groups_leave_room_for_a_plain_group_that_is_larger_than_theirs(self) -> None:
        """Otherwise the two credits that come back at a time would always go to the group of two."""
        bench = Bench(max_executing=8, max_completed=20, max_retained=20, staleness=None)
        owned, _ = take(bench)
        opened(bench, samples=4)
        assert len(owned) == 8
        bench.seal(owned[:2])
        assert take(bench) == ([], []), "kept free"
        bench.seal(owned[2:4])
        assert [len(part) for part in take(bench)] == [0, 4]
        bench.seal(owned[4:6])
        assert [len(part) for part in take(bench)] == [2, 0], "the share of plain executions is full"

    def test_a_source_whose_buffer_is_full_stops_and_goes_on_when_it_is_emptied(self) -> None:
        bench = Bench(max_executing=8, length=0)
        source = opened(bench, samples=1, capacity=2)
        _, plain = take(bench)
        assert len(plain) == 2
        bench.end_plain(plain)
        assert take(bench) == ([], []), "finished groups fill the buffer"
        assert source.pop() is not None
        assert [len(part) for part in take(bench)] == [0, 1]

    def test_a_blocked_source_stops_neither_training_nor_another_source(self) -> None:
        bench = Bench(max_executing=8)
        opened(bench, capacity=1, name="blocked")
        opened(bench, name="free")
        owned, plain = take(bench)
        assert [d.plain.suite for d in plain if d.plain] == ["blocked"] * 2 + ["free"] * 2
        bench.end_plain(plain)
        bench.seal(owned)
        owned, plain = take(bench)
        assert [d.plain.suite for d in plain if d.plain] == ["free"] * 4
        assert len(owned) == 4

    def test_sources_take_turns(self) -> None:
        bench = Bench(max_executing=16, length=0)
        for name in ("a", "b", "c"):
            opened(bench, samples=1, name=name)
        assert "".join(d.plain.suite for d in take(bench)[1] if d.plain) == "abcabcab"


class TestEnds:
    @pytest.mark.parametrize("policy", list(Submission))
    def test_success_returns_the_credit_and_gives_the_sample(self, policy: Submission) -> None:
        bench = Bench(submission=policy, length=0)
        source = opened(bench, count=1)
        _, plain = take(bench)
        assert bench.end_plain(plain, reward=0.5) == 2
        (group,) = groups(source)
        assert [sample and sample[:] for sample in group.samples] == [(0.5, 2, 0, 0)] * 2
        assert source.exhausted
        at_rest(bench)

    @pytest.mark.parametrize("policy", list(Submission))
    @pytest.mark.parametrize("outcome", ENDS)
    def test_an_end_without_a_result_is_tried_again_at_once_within_its_budget(
        self, outcome: Outcome, policy: Submission
    ) -> None:
        bench = Bench(submission=policy, length=0, max_attempts=3, max_losses=5)
        source = opened(bench, samples=1, count=1)
        budget = 5 if outcome in (Outcome.ENGINE_LOST, Outcome.WORKER_LOST) else 3
        for attempt in range(budget):
            _, plain = take(bench)
            assert [d.identity.attempt for d in plain] == [attempt]
            assert bench.end_plain(plain, outcome) == 1
        assert take(bench) == ([], [])
        assert [group.samples for group in groups(source)] == [(None,)]
        at_rest(bench)

    @pytest.mark.parametrize("reward", [float("nan"), float("inf")])
    def test_a_reward_that_is_not_finite_is_a_failed_attempt(self, reward: float) -> None:
        bench = Bench(length=0, max_attempts=1)
        source = opened(bench, samples=1, count=1)
        bench.end_plain(take(bench)[1], reward=reward)
        assert [group.samples for group in groups(source)] == [(None,)]

    def test_a_result_without_a_token_is_a_failed_attempt(self) -> None:
        bench = Bench(length=0, max_attempts=2)
        opened(bench, samples=1, count=1)
        bench.end_plain(take(bench)[1], tokens=0)
        assert [d.identity.attempt for d in take(bench)[1]] == [1]

    def test_late_and_repeated_ends_are_counted_and_change_nothing(self) -> None:
        bench = Bench(length=0)
        source = opened(bench, samples=1, count=1)
        _, (first,) = take(bench)
        bench.end_plain([first], Outcome.ENGINE_LOST)
        assert bench.end_plain([first]) == 0, "an older attempt"
        _, (second,) = take(bench)
        assert bench.end_plain([first]) == 0, "an older attempt beside the live one"
        other = Identity(second.identity.group, 0, second.identity.attempt, bench.control.ledger.incarnation - 1)
        stranger = Identity(-99, 0, 0, second.identity.incarnation)
        sibling = Identity(second.identity.group, 5, 0, second.identity.incarnation)
        for identity in (other, stranger, sibling):
            ended = PlainEnded(identity, Outcome.SEALED, 1, 0, 0, 1.0)
            found = bench.control.report(Report("w", "", "", 0, None, (), (), (ended,)))
            assert (found.accepted, found.ignored) == (0, 1)
        assert bench.end_plain([second]) == 1
        assert bench.end_plain([second]) == 0, "twice"
        assert bench.control.plain.ignored == {"sealed": 6}
        assert len(groups(source)) == 1
        at_rest(bench)

    def test_a_dead_worker_gives_back_what_it_had_of_both_kinds(self) -> None:
        bench = Bench(max_executing=8)
        opened(bench, count=2)
        owned, plain = take(bench, "dead")
        assert (len(owned), len(plain)) == (4, 4)
        assert bench.control.lose_worker("dead") == 8
        assert bench.control.lose_worker("dead") == 0
        at_rest(bench)
        owned, plain = take(bench, "alive")
        assert {d.identity.attempt for d in owned + plain} == {1}
        assert (len(owned), len(plain)) == (4, 4)

    @pytest.mark.parametrize("policy", list(Submission))
    def test_closing_a_source_returns_its_credits_once_and_makes_its_results_late(self, policy: Submission) -> None:
        bench = Bench(submission=policy, length=0)
        mine, other = opened(bench, samples=2, name="a"), opened(bench, samples=2, name="b")
        _, plain = take(bench)
        ours = [d for d in plain if d.plain and d.plain.suite == "a"]
        theirs = [d for d in plain if d.plain and d.plain.suite == "b"]
        bench.end_plain(ours[:1])
        bench.end_plain(ours[1:2], Outcome.FAILED)
        used = bench.control.plain.used
        (left, *_) = bench.control.plain.close(mine)
        assert [sample is None for sample in left.samples] == [False, True]
        assert bench.control.plain.close(mine) == []
        assert bench.control.plain.used <= used
        assert bench.end_plain(ours) == 0
        assert bench.end_plain(theirs) == len(theirs), "another source's executions go on"
        assert len(groups(other)) == len(theirs) // 2
        at_rest(bench)

    def test_identities_are_nobody_elses(self) -> None:
        bench = Bench()
        opened(bench)
        seen = [d.identity for d in bench.control.take("w", 100)]
        bench.flush()
        bench.restart()
        bench.activate()
        opened(bench)
        seen += [d.identity for d in bench.control.take("w", 100)]
        assert len(set(seen)) == len(seen) == 16
        assert bench.control.plain.ignored == {}


class TestHolds:
    def test_a_hold_closes_plain_submission_and_retries_too(self) -> None:
        bench = Bench(length=0)
        opened(bench, samples=1)
        _, plain = take(bench)
        hold = bench.control.acquire("o", "update", 1, 60.0)
        bench.end_plain(plain[:1], Outcome.FAILED)
        bench.end_plain(plain[1:2])
        assert take(bench) == ([], [])
        bench.control.admission.release(hold.hold)
        assert sorted(d.identity.attempt for d in take(bench)[1]) == [0, 1]

    def test_a_plain_execution_is_in_the_frontier_until_it_has_ended(self) -> None:
        bench = Bench(length=0)
        source = opened(bench, samples=1, count=4)
        _, plain = take(bench)
        hold = bench.control.acquire("o", "update", 1, 60.0)
        assert (hold.frontier, len(bench.control.admission.still_open(hold.hold))) == (4, 4)
        bench.end_plain(plain[:1])
        bench.end_plain(plain[1:2], Outcome.ENGINE_LOST)
        bench.control.abandon(plain[2].identity, Outcome.ABORTED, "the hold cancelled it")
        assert bench.control.admission.still_open(hold.hold) == (plain[3].identity,)
        bench.control.plain.close(source)
        assert bench.control.admission.still_open(hold.hold) == ()
        at_rest(bench)

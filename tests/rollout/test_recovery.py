"""Recovery granularity: sealed siblings are kept, or their group is redone whole; so is one whose recipe changed."""

from __future__ import annotations

import pytest

from gpu.environments.base import Environment, Episode
from gpu.environments.registry import make_environment, recipe_fingerprint
from gpu.rollout.messages import Ended, Outcome, Report
from storage import schema
from storage.errors import LedgerInvalid
from storage.ledger import Recipe
from storage.verify import verify
from tests.rollout.building import RUN, Bench

SIBLING, WHOLE = Recipe("sibling", "code"), Recipe("prompt_group", "code")


def declared(recipe: Recipe, **changes: object) -> Bench:
    bench = Bench(**{"num_siblings": 3, "max_executing": 3, **changes})  # type: ignore[arg-type]
    bench.control.declare(recipe)
    bench.flush()
    return bench


def again(bench: Bench) -> list[tuple[int, int]]:
    """(sibling, attempt) of group 0 that are dispatched after its backoff."""
    bench.clock.advance(2.0)
    return [(d.identity.sibling, d.identity.attempt) for d in bench.control.take("w", 100) if d.identity.group == 0]


@pytest.mark.parametrize(("recipe", "redone"), [(SIBLING, [(1, 1)]), (WHOLE, [(0, 1), (1, 1), (2, 1)])])
def test_after_a_failed_attempt_only_it_or_its_whole_group_is_redone(
    recipe: Recipe, redone: list[tuple[int, int]]
) -> None:
    bench = declared(recipe)
    taken = bench.control.take("w", 3)
    bench.seal(taken[:1])
    bench.fail(taken[1])
    if recipe is SIBLING:
        bench.seal(taken[2:])
    assert again(bench) == redone
    bench.control.check_conservation()


def test_a_sibling_that_was_ended_with_its_group_costs_no_budget_and_its_late_result_is_ignored() -> None:
    bench = declared(WHOLE, max_attempts=2)
    taken = bench.control.take("w", 3)
    bench.fail(taken[1])
    rollouts = bench.control.ledger.groups[0].rollouts
    assert [rollout.failures for rollout in rollouts] == [0, 1, 0]
    assert bench.control.ledger.live == 0
    late = bench.report_of(taken[:1])
    assert bench.control.report(late).ignored == 1
    assert again(bench) == [(0, 1), (1, 1), (2, 1)]


def test_a_worker_that_dies_with_two_siblings_restarts_their_group_once() -> None:
    bench = declared(WHOLE)
    bench.control.take("w", 2)
    assert bench.control.lose_worker("w") == 2
    assert bench.control.ledger.counts["requeued_prompt_group"] == 1
    assert again(bench) == [(0, 1), (1, 1), (2, 1)]


def test_a_report_that_seals_one_sibling_and_fails_another_redoes_both() -> None:
    bench = declared(WHOLE)
    taken = bench.control.take("w", 3)
    report = bench.report_of(taken[:1])
    failed = Ended(taken[1].identity, Outcome.FAILED, detail="boom")
    bench.control.report(
        Report("w", report.block, report.digest, report.size, report.inline, (), (*report.ended, failed))
    )
    assert again(bench) == [(0, 1), (1, 1), (2, 1)]
    bench.flush()
    assert bench.control.ledger.counts["tokens_wasted"] == 1


@pytest.mark.parametrize(
    ("first", "then", "redone", "reason"),
    [
        (SIBLING, SIBLING, [(1, 1), (2, 1)], ""),
        (WHOLE, WHOLE, [(0, 1), (1, 1), (2, 1)], "prompt_group"),
        (WHOLE, SIBLING, [(0, 1), (1, 1), (2, 1)], "prompt_group"),
        (SIBLING, Recipe("sibling", "other code"), [(0, 1), (1, 1), (2, 1)], "recipe_changed"),
        (SIBLING, WHOLE, [(1, 1), (2, 1)], ""),
    ],
)
def test_after_a_restart_a_group_is_recovered_as_its_own_recipe_says(
    first: Recipe, then: Recipe, redone: list[tuple[int, int]], reason: str
) -> None:
    """The granularity of its first dispatch holds for a group; another fingerprint makes it whole in any case."""
    bench = declared(first)
    taken = bench.control.take("w", 3)
    bench.seal(taken[:1])
    bench.restart()
    assert bench.control.declare(then) == bool(reason)
    bench.activate()
    assert again(bench) == redone
    if reason:
        assert bench.control.ledger.counts[f"requeued_{reason}"] == 1


def test_finished_groups_stay_whatever_the_recipe_becomes() -> None:
    bench = declared(WHOLE, length=2, batch=1, max_executing=6)
    bench.seal(bench.control.take("w", 6)[:3])
    assert bench.control.ledger.state_counts()["completed"] == 1
    bench.restart()
    bench.control.declare(Recipe("prompt_group", "other code"))
    bench.activate()
    assert bench.train() == (0,)
    bench.seal(bench.control.take("w", 6))
    assert bench.train() == (1,)
    bench.control.finish("done")
    bench.flush()
    assert verify(bench.store, RUN).sound


def test_a_recipe_is_recorded_once_and_an_unknown_recovery_is_refused() -> None:
    bench = declared(SIBLING)
    bench.control.declare(SIBLING)
    assert bench.control.ledger.counts["recipe_declared"] == 1
    with pytest.raises(LedgerInvalid, match="prompt_group"):
        bench.control.books.record(schema.RecipeDeclared("some", "x"))


class Ours(Environment):
    """An environment of this module."""

    max_new_tokens = 1

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> bytes:
        return b"{}"

    def episode(self) -> Episode:
        raise NotImplementedError


def test_the_fingerprint_tells_environments_apart_and_not_their_options() -> None:
    three, four = (make_environment("reverse", {"letters": letters}) for letters in (3, 4))
    assert recipe_fingerprint(three) == recipe_fingerprint(four)
    assert (
        len(
            {
                recipe_fingerprint(three),
                recipe_fingerprint(make_environment("addition", {})),
                recipe_fingerprint(Ours()),
            }
        )
        == 3
    )

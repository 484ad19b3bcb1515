"""pass@k and the mean reward against their definitions."""

from __future__ import annotations

import itertools

import pytest

from gpu.rollout.scores import ks, pass_at_k, scores


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples: int) -> None:
    for successes, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([1] * successes + [0] * (samples - successes), k))
        assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(2000, 0, 2000) == 0.0
    assert pass_at_k(2000, 1, 2000) == 1.0


def test_k_goes_in_powers_of_two_to_the_number_of_samples() -> None:
    assert [ks(1), ks(4), ks(6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


def test_a_sample_succeeds_above_the_threshold_only() -> None:
    rewards = [[0.5, 1.0], [0.0, -1.0]]
    assert scores(rewards, 2, 0.0) == {"reward_mean": 0.125, "pass@1": 0.5, "pass@2": 0.5}
    assert scores(rewards, 2, 0.5) == {"reward_mean": 0.125, "pass@1": 0.25, "pass@2": 0.5}


def test_a_failed_sample_takes_no_part() -> None:
    """A failure is never a reward of 0: neither the mean nor pass@1 sinks, and pass@2 is of the tasks that have two."""
    assert scores([[1.0], [1.0, 0.0]], 2, 0.0) == {"reward_mean": pytest.approx(2 / 3), "pass@1": 0.75, "pass@2": 1.0}
    assert scores([[1.0], []], 2, 0.0) == {"reward_mean": 1.0, "pass@1": 1.0}
    assert scores([[], []], 2, 0.0) == {}

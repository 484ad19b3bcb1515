"""Configurations that must deadlock are refused at start, with the arithmetic; one that only idles is warned about."""

from __future__ import annotations

import pytest

from gpu.rollout.limits import Submission, check_group_bytes, check_limits
from storage.errors import ConfigurationRefused
from tests.rollout.building import limits


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_completed": 3, "batch": 2, "max_backoff": 2}, "3 < batch 2 \\+ max_backoff 2 = 4"),
        ({"max_retained": 5, "max_completed": 6}, r"max_retained \(R\) = 5 < max_completed \(P\) = 6"),
        ({"max_executing": 1, "num_siblings": 2}, r"max_executing \(E\) = 1 rollouts < n = 2"),
        ({"eviction_cap": 1, "batch": 2}, "eviction_cap = 1 < batch 2"),
        ({"max_hot_bytes": 1, "num_siblings": 2}, "one group of 2 rollouts"),
        ({"staleness": 0, "prefetch": 1}, "staleness = 0 with prefetch = 1"),
        ({"staleness": -1}, "staleness = -1"),
        ({"batch": 0}, "batch = 0"),
        ({"max_attempts": 0}, "max_attempts = 0"),
        ({"backoff_base_s": -1.0}, "backoff_base_s = -1"),
    ],
)
def test_a_deadlock_is_refused_with_its_arithmetic(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationRefused, match=says) as caught:
        check_limits(limits(**changes))
    assert (caught.value.exit_code, caught.value.code) == (2, "deadlock")
    assert isinstance(caught.value, ValueError)


def test_a_memory_bound_below_one_group_is_refused() -> None:
    with pytest.raises(ConfigurationRefused, match="max_hot_bytes = 1048576 < 2000000"):
        check_group_bytes(limits(), 2_000_000)
    check_group_bytes(limits(), 1000)


def test_generation_that_will_idle_is_a_warning() -> None:
    assert check_limits(limits()) == []
    warned = check_limits(limits(submission=Submission.GROUP, max_executing=7))
    assert len(warned) == 1
    assert "6 < 7 groups" in warned[0]

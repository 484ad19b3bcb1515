"""Finished work is never thrown away for lack of room: a group has its place among the completed from first dispatch.

The trainer is five times slower than generation, so that the buffer is always full. Where a place is taken only when a
group completes, most finished groups are generated again, and the long ones lose: they are trained too rarely.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from benchmarks.pipeline import Pipeline, Ran, Speeds, generation_s, limits_for, longest_shares
from gpu.rollout.limits import Submission

SIBLINGS, BATCH, GROUPS = 2, 8, 960
TOKENS_PER_S = 50.0

POLICIES = pytest.mark.parametrize("submission", list(Submission), ids=lambda policy: policy.value)
# Groups that are generated at once; under the sample policy, as many rollouts as those have.
EXECUTING = pytest.mark.parametrize("executing", [4, 16, 64], ids=lambda groups: f"E={groups}")


def draw(seed: int, groups: int) -> list[list[int]]:
    """Log-normal lengths with a long tail (sigma 0.9)."""
    lengths = np.random.default_rng(seed).lognormal(math.log(1000), 0.9, (groups, SIBLINGS))
    return np.ceil(lengths).astype(int).tolist()


def slow_trainer(tokens: list[list[int]], executing: int, submission: Submission) -> Speeds:
    """Five times slower than `executing` groups that are generated at once."""
    slots = executing * SIBLINGS
    train_s = 5 * BATCH * generation_s(tokens, submission, TOKENS_PER_S, slots)
    return Speeds(train_s, train_s / 50, TOKENS_PER_S, slots)


def run(tokens: list[list[int]], staleness: int | None, speeds: Speeds, submission: Submission) -> Ran:
    limits = limits_for(staleness, batch=BATCH, siblings=SIBLINGS, slots=speeds.slots, submission=submission)
    return Pipeline(tokens, limits, speeds).run()


def thrown_away(ran: Ran) -> dict[str, int]:
    """What the ledger counted of groups and attempts that did not go straight from dispatch to the trainer."""
    kinds = ("group_requeued", "group_discarded", "group_quarantined", "attempt_abandoned", "lease_rolled_back")
    return {kind: ran.counts[kind] for kind in kinds if ran.counts[kind]}


@POLICIES
@EXECUTING
@pytest.mark.parametrize("staleness", [None, 2], ids=lambda bound: f"S={bound}")
@pytest.mark.parametrize("seed", [0, 1])
def test_no_finished_group_is_generated_again_for_lack_of_room(
    seed: int, staleness: int | None, executing: int, submission: Submission
) -> None:
    tokens = draw(seed, GROUPS // 4)
    ran = run(tokens, staleness, slow_trainer(tokens, executing, submission), submission)
    assert thrown_away(ran) == {}
    assert ran.counts["rollouts_minted"] == ran.counts["rollouts_sealed"] == len(tokens) * SIBLINGS
    assert ran.generated_tokens == sum(map(sum, tokens))
    assert sorted(ran.trained) == list(range(len(tokens))), "each group once"
    if staleness is not None:
        assert max(ran.staleness) <= staleness


@POLICIES
@EXECUTING
def test_long_prompts_are_trained_as_often_as_the_source_has_them(executing: int, submission: Submission) -> None:
    """Unbounded staleness: no rule waits for the long ones.

    At most P groups are unsettled at once, so the first k groups trained are the first k of the source except for at
    most P, in whose place others came. Where length plays no part, each of these two parts holds a number of long ones
    (share p) with a variance of at most P p (1 - p). Four standard deviations, over all seeds, leave room for the few
    long ones that still run at the cut.
    """
    differences: list[float] = []
    for seed in range(3):
        tokens = draw(seed, GROUPS)
        speeds = slow_trainer(tokens, executing, submission)
        ran = run(tokens, None, speeds, submission)
        assert ran.seconds < 1.1 * (GROUPS // BATCH) * (speeds.train_s + speeds.update_s), "the trainer hardly waits"
        source, trained = longest_shares(tokens, ran.trained)
        differences.append(trained - source)
    completed = limits_for(
        None, batch=BATCH, siblings=SIBLINGS, slots=speeds.slots, submission=submission
    ).max_completed
    deviation = math.sqrt(2 * completed * 0.05 * 0.95) / (0.6 * GROUPS)
    assert abs(statistics.fmean(differences)) < 4 * deviation / math.sqrt(len(differences)), differences

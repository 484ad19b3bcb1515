"""What an evaluation's rewards say: their mean, and pass@k.

pass@k is the probability that at least one of k samples of a task succeeds, by the unbiased estimator of Chen et al.
2021 (arXiv 2107.03374). A sample succeeds when its reward is above the suite's threshold. A sample without a reward
takes no part: it is neither a success nor a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of k-subsets of n samples that hold at least one of c successes."""
    assert 0 <= successes <= samples, "successes are samples"
    assert 1 <= k <= samples, "k of the samples that there are"
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def ks(samples: int) -> list[int]:
    """Powers of two up to the number of samples, and that number itself."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def scores(rewards: Sequence[Sequence[float]], samples: int, threshold: float) -> dict[str, float]:
    """`rewards[task]` are those of the task's samples that have one, at most `samples`. `reward_mean` is over samples.
    `pass@k` is over the tasks with at least k of them; a k without such a task is left out."""
    flat = [reward for task in rewards for reward in task]
    found = {"reward_mean": math.fsum(flat) / len(flat)} if flat else {}
    for k in ks(samples):
        able = [(len(task), sum(reward > threshold for reward in task)) for task in rewards if len(task) >= k]
        if able:
            found[f"pass@{k}"] = math.fsum(pass_at_k(n, c, k) for n, c in able) / len(able)
    return found

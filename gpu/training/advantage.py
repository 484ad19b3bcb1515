"""From rewards of sibling rollouts to advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STD_EPSILON = 1e-4


def group_normalized(rewards: Sequence[float]) -> npt.NDArray[np.float64]:
    """GRPO (arXiv 2402.03300): (R - mean) / (std + 1e-4) over the siblings of one group, population std; [n].

    One reward for each sibling slot, however many samples the slot has: a slot with many samples weighs no more in the
    baseline than one with a single sample.
    """
    values = np.asarray(rewards, np.float64)
    return (values - values.mean()) / (values.std() + STD_EPSILON)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ at all; otherwise its gradient is zero (DAPO, arXiv 2503.14476)."""
    return len(set(rewards)) > 1

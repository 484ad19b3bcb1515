"""Policy-gradient losses over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the probability ratio: [1 - low, 1 + high]."""

    low: float
    high: float


def clipped_token_loss(logprobs_P: Tensor, behaviour_P: Tensor, advantages_P: Tensor, clip: Clip) -> Tensor:
    """Sum over P generated tokens of -min(r A, clip(r) A), r = exp(logprob - behaviour logprob).

    DAPO (arXiv 2503.14476, clip-higher); dividing by the token count of the whole batch gives its token-level loss:
    every generated token weighs the same, so a rollout weighs as much in several samples as in one. The behaviour
    logprobs are those recorded at generation, so one clip covers staleness and engine mismatch.
    """
    ratio = torch.exp(logprobs_P - behaviour_P)
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return -torch.minimum(ratio * advantages_P, clipped * advantages_P).sum()


def clip_fraction(logprobs_P: Tensor, behaviour_P: Tensor, advantages_P: Tensor, clip: Clip) -> Tensor:
    """Number of tokens whose gradient the clip removes."""
    ratio = torch.exp(logprobs_P - behaviour_P)
    above = (ratio > 1.0 + clip.high) & (advantages_P > 0)
    below = (ratio < 1.0 - clip.low) & (advantages_P < 0)
    return (above | below).sum()

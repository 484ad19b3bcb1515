"""Sampling that does not depend on batch mates: one uniform draw per (seed, token index), by inverse CDF."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def uniforms(seeds_B: npt.NDArray[np.uint64], indices_B: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, index): the finaliser of SplitMix64 (Steele, Lea, Flood 2014) as a hash."""
    with np.errstate(over="ignore"):
        x = seeds_B + (indices_B + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) & _MASK
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def sample(
    logits_BV: Tensor,
    temperatures_B: npt.NDArray[np.float64],
    draws_B: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Token ids and the log probability of each under the distribution it was drawn from (temperature 0: greedy, with
    the log probability at temperature 1)."""
    greedy = temperatures_B == 0.0
    scale = torch.from_numpy(np.where(greedy, 1.0, temperatures_B)).to(logits_BV.device, torch.float32)
    logprobs = torch.log_softmax(logits_BV.float() / scale[:, None], -1)
    cumulative = logprobs.exp().cumsum(-1)
    # The last value is 1 up to rounding; scaling the draw by it keeps every draw inside the vocabulary.
    targets = torch.from_numpy(draws_B).to(logits_BV.device, torch.float32)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(tokens.device), logits_BV.argmax(-1), tokens)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()

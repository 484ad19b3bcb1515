"""The numbers of training, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with linear warm-up over `warmup` updates and a bound on the gradient norm."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    warmup: int
    max_grad_norm: float


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """`engine_dtype` is what engines compute in and what is published; `autocast` trains in bfloat16 over float32
    weights; `micro_positions` bounds the padded size of one forward pass."""

    optimizer: OptimizerSettings
    clip_low: float
    clip_high: float
    drop_zero_variance: bool
    micro_positions: int
    autocast: bool
    engine_dtype: str

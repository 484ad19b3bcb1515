"""The limits that the benchmarks of rollout control use, but for what each of them is about."""

from __future__ import annotations

from gpu.rollout.limits import Limits, Order, Submission


def bench_limits(
    siblings: int,
    batch: int,
    submission: Submission,
    *,
    staleness: int | None,
    executing: int,
    completed: int,
    backoff: int,
) -> Limits:
    """`executing`, `completed` and `backoff` are groups; the sample policy counts `executing` in rollouts."""
    return Limits(
        num_siblings=siblings,
        batch=batch,
        staleness=staleness,
        submission=submission,
        order=Order.FIFO,
        max_executing=executing * siblings if submission is Submission.SAMPLE else executing,
        max_retained=completed,
        max_completed=completed,
        max_hot_bytes=64 << 20,
        eviction_cap=None,
        prefetch=0,
        max_backoff=backoff,
        max_postprocessing=64,
        max_attempts=5,
        max_losses=20,
        backoff_base_s=0.5,
        backoff_max_s=60.0,
        undurable_age_s=30.0,
        undurable_bytes=64 << 20,
        discard_end_of_source=False,
    )

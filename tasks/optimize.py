"""Lease a batch and train it."""

from __future__ import annotations

from prefect import task

from gpu.training.messages import Trained
from storage.errors import TrainingDiverged
from tasks.session import PHASE, deadline, session


@task(task_run_name="lease_batch-{step}", **PHASE)
async def lease_batch(step: int) -> int:
    """Wait for a full, fresh enough batch; its lease is issued here. Returns the number of groups, 0 at the end of a
    finite source."""
    one = session()
    one.grant = await one.manager.lease(one.caller, one.spec.steps.lease_s)
    return len(one.grant.lease.groups) if one.grant else 0


@task(task_run_name="train_batch-{step}", **PHASE)
async def train_batch(step: int) -> dict[str, float]:
    """One optimizer step on the leased groups, then its commit. After the trainer's first change the only way out is
    the commit, or the end of the incarnation."""
    one, began = session(), deadline().now()
    assert one.grant is not None, "lease before training"
    try:
        trained: Trained = await one.trainer.train(one.caller, one.grant)
    except TrainingDiverged:
        # The trainer says that nothing was changed: the work is kept, the user decides.
        await one.manager.roll_back(one.caller, one.grant.lease.lease, "diverged")
        raise
    await one.manager.commit(
        one.caller, trained.lease, trained.step, trained.state_digest, trained.weights_digest, trained.metrics
    )
    one.grant = None
    one.step = one.committed = trained.step
    deadline().trained(deadline().now() - began)
    one.history.append({"step": float(trained.step), **trained.metrics})
    return trained.metrics


async def prefetch_batch() -> int:
    """Move the payload of probable next groups to the trainer; holds no lease. Returns the number of blocks."""
    one = session()
    count = one.spec.limits.prefetch
    grant = await one.manager.peek(one.caller, count) if count else None
    return await one.trainer.prefetch(grant) if grant else 0

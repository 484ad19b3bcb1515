"""Wait for what an update must not cut."""

from __future__ import annotations

from prefect import task

from gpu.rollout.drain import Drained
from tasks.session import PHASE, session


@task(task_run_name="drain_rollouts-{step}", **PHASE)
async def drain_rollouts(step: int) -> int:
    """Wait as the drain policy says. Returns how many executions had not ended at its deadline."""
    one = session()
    assert one.hold is not None, "hold before draining"
    drained: Drained = await one.manager.drain(one.caller, one.hold, one.spec.steps.drain)
    return drained.left
